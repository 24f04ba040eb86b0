"""The commands: they read options, call the library and print, and hold no rules of their own."""

import os
import signal
from threading import current_thread, main_thread
from types import FrameType


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C as Python does, but end the process during an import, whose C++ code would lose the exception."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(128 + signal.SIGINT)
        frame = frame.f_back
    raise KeyboardInterrupt


# A shell lets its background processes ignore Ctrl-C. Only the main thread may set handlers.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler and current_thread() is main_thread():
    signal.signal(signal.SIGINT, interrupt)
# A scheduler may send SIGUSR1 while ranks still import, which kills them by default. It waits until
# `vitpar.launch.stop_request` takes it. That module is not imported here, since it imports numpy first.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
