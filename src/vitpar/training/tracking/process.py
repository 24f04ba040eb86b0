"""Process that writes to one tracker: it reads messages from stdin and ends with them.

    python -m vitpar.training.tracking.process < messages      # started by vitpar.training.tracking.channel

Each message is a line of JSON: first the tracker's name and the run, then steps with their values, at last how the run
ended. If the training is killed, the input ends without that last message, and the run counts as failed.

An error of the tracker ends the process with one line on stdout. All that the tracker prints is discarded, since it
would end up between the lines of the training.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import BinaryIO

from vitpar.text import printable, shown
from vitpar.training.tracking.tracked_run import TrackedRun
from vitpar.training.tracking.writers import WRITERS

NICENESS = 10
"""Priority below that of the training, which computes on the same cores."""
LINGER_S = 120
"""Seconds after the end of the input at which the process is killed, for a run that no longer waits for it."""


def write_all(lines: Iterable[bytes]) -> None:
    """Write all messages to the tracker that the first one names."""
    messages = map(json.loads, lines)
    first = next(messages)
    writer = WRITERS[first["tracker"]](TrackedRun(**first["run"]))
    failed = True
    for message in messages:
        if "values" in message:
            writer.log(message["step"], message["time"], message["values"])
        else:
            failed = message["failed"]
    signal.alarm(LINGER_S)
    writer.close(failed)


def _detached() -> tuple[BinaryIO, int]:
    """Return the input and the descriptor of the output, and discard what anything else reads or prints.

    The processes that a tracker starts do not inherit them, so the training sees when this process ends.
    """
    source, out = os.fdopen(os.dup(0), "rb"), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    return source, out


def main() -> int:
    """Write to a tracker until the input ends, and return the exit code."""
    source, out = _detached()
    for number in (signal.SIGINT, signal.SIGTERM):  # the training decides when to end
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(NICENESS)
    try:
        write_all(source)
    except BaseException as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())
        os.write(out, printable(shown(words)).encode("utf-8", "replace"))
        os._exit(1)  # threads of a tracker that failed may never end
    return 0


if __name__ == "__main__":
    sys.exit(main())
