"""Signals that ask a process to end: SIGTERM and SIGUSR1, as schedulers send them, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType

ASKING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""These signals."""
SAVED = 75
"""Exit code of a run that was asked to end and can be resumed: EX_TEMPFAIL of sysexits.h, "try again later"."""
STOPPING = "stopping after this step, then saving: press Ctrl-C again to end now"
"""Notice on stderr at the first Ctrl-C of a run that saves."""


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
        alone = threading.current_thread() is threading.main_thread()
        self._former = {number: signal.signal(number, self._note) for number in ASKING} if alone else {}
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked is None:
            self.asked = signal.Signals(number)
            if self._notice and number == signal.SIGINT:
                os.write(2, f"\n{self._notice}\n".encode())  # not print: the signal may interrupt a print
            return
        self.again = True
        if not self._only_note:
            signal.signal(number, self._former[signal.Signals(number)])
            os.kill(os.getpid(), number)
