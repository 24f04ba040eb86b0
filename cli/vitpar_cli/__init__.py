"""The commands: they read options, call the library and print, and hold no rules of their own."""

import signal

# A scheduler may send SIGUSR1 while ranks still import, which kills them by default. It waits until
# `vitpar.launch.stop_request` takes it. That module is not imported here, since it imports numpy first.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
