"""Process that runs cases, started by `hunt.py`.

    python -m fuzzing.worker DESCRIPTOR FOLDER

It reads orders from standard input, a line of JSON each, and reports every step to the file descriptor. So the parent
knows which case was running if the process hangs or dies.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from fuzzing import guard, oracle
from fuzzing.target import Target, found
from vitpar.errors import UserError

_PR_SET_PDEATHSIG = 1
RETIRES_BYTES, RETIRES_FILES = 1 << 29, 200
"""Growth of memory and of open files at which a worker retires, so that the next case is not blamed for it."""


class Worker:
    """Runner of cases, for one target at a time.

    channel: stream for its reports. home: its folder.
    """

    def __init__(self, channel: TextIO, home: Path) -> None:
        self._channel, self._home = channel, home
        self._name: str | None = None
        self._target: Target | None = None
        self._watch = guard.Watch(guard.add_stubs(home / "stubs"))
        (home / guard.CANARY).write_bytes(b"not yours")

    def obey(self, order: dict[str, Any]) -> bool:
        """Run the cases of an order; return False if the worker must retire."""
        self._load(order["target"])
        assert self._target is not None
        begun, files = guard.status("VmRSS"), _open_files()
        end = time.monotonic() + order["seconds"]
        last = order["last"]
        number = order["first"]
        while (last is None or number <= last) and time.monotonic() < end:
            self._run(number)
            number += 1
            if guard.status("VmRSS") > begun + RETIRES_BYTES or _open_files() > files + RETIRES_FILES:
                self._say(over=number, retired=True)
                return False
        self._say(over=number)
        return True

    def _load(self, name: str) -> None:
        if name == self._name:
            return
        if self._target is not None:
            self._target.close()
        folder = self._home / name.replace(":", ".")
        folder.mkdir(parents=True, exist_ok=True)
        self._name, self._target = name, found(name)(folder)
        gc.collect()
        guard.limit_address_space()

    def _run(self, number: int) -> None:
        assert self._target is not None and self._name is not None
        self._say(making=number)
        case = self._target.case(self._name, number, self._home / "case")
        self._say(reading=number, how=case.how, bytes=case.bytes)
        before, begin = guard.reset_peak(), time.perf_counter()
        accepted, told, found_wrong = True, None, []
        with self._watch.over(case.place, self._target.programs) as seen:
            try:
                self._target.read(case)
            except BaseException as error:
                accepted = isinstance(error, oracle.Wrong)
                found_wrong = oracle.of_error(error)
                if isinstance(error, UserError) and case.untouched:
                    words = f"a seed is refused\n{oracle.trace(error)}"
                    found_wrong.append(oracle.Finding("damage", "seed", oracle.place(error), words))
                told = oracle.trace(error, lines=None)
                del error
        seconds, mib = time.perf_counter() - begin, (guard.peak() - before) / guard.MIB
        found_wrong += seen
        if mib * guard.MIB > guard.BYTES:
            words = f"{mib:,.0f} MiB above what there was before the case\n{told or 'it was accepted'}"
            found_wrong.append(oracle.Finding("memory", "taken", _where(told), words))
        self._say(
            done=number,
            accepted=accepted,
            seconds=seconds,
            mib=mib,
            told=told,
            findings=[asdict(finding) for finding in found_wrong],
        )

    def _say(self, **facts: Any) -> None:
        self._channel.write(json.dumps(facts) + "\n")
        self._channel.flush()


def _where(told: str | None) -> str:
    """Return file:line of the innermost frame of vitpar in a traceback."""
    lines = [line.strip() for line in (told or "").split("\n") if f'File "{oracle.READERS}' in line]
    if not lines:
        return "?"
    path, line = lines[-1].split('"')[1], lines[-1].split(", line ")[1].split(",")[0]
    return f"{oracle.short(path)}:{line}"


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def main() -> None:
    """Run orders until the input ends or the worker retires."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # die with the parent, even during a case
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the parent asks a hung worker for its stacks
    descriptor, home = int(sys.argv[1]), Path(sys.argv[2])
    worker = Worker(os.fdopen(descriptor, "w"), home)
    for line in sys.stdin:
        if not worker.obey(json.loads(line)):
            break
    os._exit(0)  # threads of a case may still be running


if __name__ == "__main__":
    main()
