"""Signals that ask a process to end: SIGTERM and SIGUSR1, as schedulers send them, and Ctrl-C.

| while a rank, or the process that launches ranks, | SIGUSR1 | SIGTERM | Ctrl-C |
|---|---|---|---|
| starts Python | kills it | kills it | ends it with 130 |
| imports and reads its command | waits, since `vitpar_cli` blocks it | kills it | ends it with 130 |
| starts | ends it with SAVED (`stop_at_once`) | the same | ends it with 130 |
| trains | ends the run after it saved (`StopRequest`) | the same | the same |
"""

import os
import signal
import threading
from functools import partial
from types import FrameType
from typing import Self

_EARLY = (signal.SIGTERM, signal.SIGUSR1)
"""Signals of schedulers."""
ASKING = (*_EARLY, signal.SIGINT)
"""Signals that ask a process to end."""
SAVED = 75
"""Exit code of a run that was asked to end and can be resumed: EX_TEMPFAIL of sysexits.h, "try again later"."""
STOPPING = "stopping after this step, then saving: press Ctrl-C again to end now"
"""Notice on stderr at the first Ctrl-C of a run that saves."""


_block = partial(signal.pthread_sigmask, signal.SIG_BLOCK, _EARLY)
_unblock = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, _EARLY)


def signal_words(number: signal.Signals) -> str:
    """Return the name of a signal for messages."""
    return "Ctrl-C" if number == signal.SIGINT else number.name


def stop_at_once() -> None:
    """Make SIGTERM and SIGUSR1 end this process with SAVED until a StopRequest takes them: nothing is lost before it.

    For schedulers, which may start the job again.
    """
    for number in _EARLY:
        signal.signal(number, _stop)
    _unblock()
    # Children have other reasons to be ended. A signal waits until a child can tell.
    os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_forget)


def _stop(number: int, frame: FrameType | None) -> None:
    os.write(2, f"stopped by {signal.Signals(number).name} before the first step\n".encode())
    os._exit(SAVED)


def _forget() -> None:
    """Undo `stop_at_once` in a child, unless a StopRequest has taken over."""
    for number in _EARLY:
        if signal.getsignal(number) is _stop:
            signal.signal(number, signal.SIG_DFL)
    _unblock()


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

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            self._former = {}
            return self
        former = {number: signal.signal(number, self._note) for number in ASKING}
        self._former = {number: signal.SIG_DFL if handler is _stop else handler for number, handler in former.items()}
        _unblock()
        return self

    def __exit__(self, *error: object) -> None:
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
