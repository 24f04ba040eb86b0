"""Signals that ask a process to end: SIGTERM and SIGUSR1, as schedulers send them, and Ctrl-C.

| while a rank, or the process that launches ranks, | SIGUSR1 | SIGTERM | Ctrl-C |
|---|---|---|---|
| starts Python | kills it | kills it | ends it with 130 |
| imports and reads its command | waits, since `vitpar_cli` blocks it | kills it | ends it with 130 |
| starts | ends it with SAVED (`stop_at_once`) | the same | ends it with 130 |
| trains | ends the run after it saved (`StopRequest`) | the same | the same |
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType

from vitpar.launch.world import REPORTS

ASKING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""These signals."""
_EARLY = (signal.SIGTERM, signal.SIGUSR1)
"""Signals of schedulers."""
SAVED = 75
"""Exit code of a run that was asked to end and can be resumed: EX_TEMPFAIL of sysexits.h, "try again later"."""
ASKED = "asked"
"""File in the folder of reports with the number of the signal that the launcher got and passes on as SIGTERM."""
STOPPING = "stopping after this step, then saving: press Ctrl-C again to end now"
"""Notice on stderr at the first Ctrl-C of a run that saves."""


def signal_words(number: signal.Signals) -> str:
    """Return the name of a signal for messages."""
    return "Ctrl-C" if number == signal.SIGINT else number.name


def stop_at_once() -> None:
    """Make SIGTERM and SIGUSR1 end this process with SAVED until a StopRequest takes them: nothing is lost before it.

    For schedulers, which may start the job again. Also ends a rank in C code, where handlers of Python do not run.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for number in _EARLY:
        signal.signal(number, _nothing)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # Children have the pipe, and other reasons to be ended. A signal waits until a child has left it.
    os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_leave_pipe)
    _unblock()

    def wait() -> None:
        while (number := os.read(reader, 1)[0]) not in _EARLY:
            pass
        os.write(2, f"stopped by {signal.Signals(number).name} before the first step\n".encode())
        os._exit(SAVED)

    threading.Thread(target=wait, name="vitpar-stop", daemon=True).start()


def _block() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _EARLY)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _EARLY)


def _leave_pipe() -> None:
    _take_over()
    _unblock()


def _nothing(number: int, frame: FrameType | None) -> None:
    pass


def _take_over() -> None:
    """End what `stop_at_once` began."""
    for number in _EARLY:
        if signal.getsignal(number) is _nothing:
            signal.set_wakeup_fd(-1)
            signal.signal(number, signal.SIG_DFL)


class StopRequest:
    """Context manager that notes stop signals (`ASKING`).

    The first signal is noted in `asked`; a second one does what it did before the block. In a thread that is not the
    main one, signals are left alone.

    only_note: whether a second signal is only noted, in `again`.
    notice: line for stderr at the first signal, if it is Ctrl-C.
    """

    def __init__(self, *, only_note: bool = False, notice: str = "") -> None:
        self.asked: signal.Signals | None = None
        self.again = False
        self._only_note, self._notice = only_note, notice

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is not threading.main_thread():
            self._former = {}
            return self
        _take_over()
        self._former = {number: signal.signal(number, self._note) for number in ASKING}
        _unblock()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked is None:
            self.asked = signal.Signals(number)
            with suppress(KeyError, OSError):  # a rank of another launcher, or a signal to this rank alone
                self.asked = signal.Signals(int(Path(os.environ[REPORTS], ASKED).read_text()))
            if self._notice and self.asked == signal.SIGINT:
                os.write(2, f"\n{self._notice}\n".encode())  # not print: the signal may interrupt a print
            return
        self.again = True
        if not self._only_note:
            signal.signal(number, self._former[signal.Signals(number)])
            os.kill(os.getpid(), number)
