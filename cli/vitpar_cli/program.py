"""Frame of every vitpar process, command or rank: standard streams, shared cores, errors as sentences, exit codes.

The reader of a standard stream may be gone, its device full, or the stream closed before the command began.
"""

import errno
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from vitpar.errors import FaultError, LaunchError, UserError
from vitpar.launch import find_world, reporting, share_cores
from vitpar.terminal import complain, forwarded
from vitpar.text import shown

READER_GONE = 141
"""Exit code of a command whose reader is gone, as if SIGPIPE (13) had ended it."""
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space"),
    **dict.fromkeys((errno.EIO, errno.ESTALE, errno.EROFS), "check its disk or mount"),
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
}
"""Advice by the number of an OSError that is not a fault of the program."""
_outlives_reader = False


def run_program(program: Callable[[], int]) -> NoReturn:
    """Run `program` and exit with the code that it returns.

    Exit codes: 0 for success, 1 for a failure, 2 for an error that the user must fix, 130 after Ctrl-C.
    """
    _prepare_streams()
    try:
        with reporting(), _storage_error_as_sentence():
            with suppress(LaunchError):  # the command reports it if it needs a world
                if world := find_world():
                    share_cores(world)  # must precede the import of torch
                    if world.size > 1:
                        outlive_reader()  # other ranks wait for this one
                    if world.launcher == "openmpi":
                        forwarded()
            code = program()
        sys.exit(code)
    except KeyboardInterrupt:
        sys.exit(130)
    except (UserError, FaultError) as error:
        if os.environ.get("VITPAR_DEBUG"):
            traceback.print_exc()
        complain(f"error: {error}")
        sys.exit(2 if isinstance(error, UserError) else 1)


def outlive_reader() -> None:
    """Make this command continue without output if the reader of its output is gone, as training does."""
    global _outlives_reader
    _outlives_reader = True


def _prepare_streams() -> None:
    """Open closed standard streams on the null device, and let the others survive characters and readers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is this one. Otherwise, the next file that is opened would get the output.
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r"))  # noqa: SIM115, for the whole process
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:
            options = stream.line_buffering, stream.write_through
            # A terminal that knows ASCII alone gets ? for other characters.
            setattr(sys, name, _Stream(stream.detach(), stream.encoding, "replace", None, *options))


@contextmanager
def _storage_error_as_sentence() -> Iterator[None]:
    """Turn an OSError of a disk, a mount or a limit within the context into a UserError."""
    try:
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
    except OSError as error:
        if error.errno not in _REMEDIES:
            raise
        _discard(1)  # or Python would fail again when it flushes the rest at exit
        name = f" '{shown(error.filename)}'" if error.filename else ""
        raise UserError(f"cannot write{name}: {error.strerror}: {_REMEDIES[error.errno]}") from None


class _Stream(io.TextIOWrapper):
    """Standard stream that ends the command, or discards its output, once its reader is gone."""

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except BrokenPipeError:
            self._reader_is_gone()
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except BrokenPipeError:
            self._reader_is_gone()

    def _reader_is_gone(self) -> None:
        _discard(self.fileno())
        if not _outlives_reader:
            raise SystemExit(READER_GONE)


def _discard(number: int) -> None:
    """Send what is written to the descriptor `number` to the null device."""
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), number)
