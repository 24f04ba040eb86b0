"""CPU seconds of this process and of all that it started, on Linux."""

import os
from contextlib import suppress
from pathlib import Path


def cpu_seconds() -> float:
    """Return the CPU seconds of this process, its living descendants, and those of them that ended and were reaped."""
    ticks, waiting = 0, [os.getpid()]
    while waiting:
        process = Path("/proc", str(waiting.pop()))
        with suppress(OSError):  # it may have ended since
            # After the name in parentheses, fields 11 to 14 are its user and system ticks, and those of reaped ones.
            ticks += sum(map(int, (process / "stat").read_text().rpartition(")")[2].split()[11:15]))
            for thread in (process / "task").iterdir():
                waiting += map(int, (thread / "children").read_text().split())
    return ticks / os.sysconf("SC_CLK_TCK")
