"""Readers with planted faults, for the tests of the fuzzing harness."""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

from fuzzing import oracle
from fuzzing.target import Case, FileTarget, Target
from vitpar.errors import DataError

CASES = 4


class Planted(Target):
    """Reader that accepts every case except the second, for which it calls `wrong`."""

    what = "nothing"

    def __init__(self, home: Path) -> None:
        pass

    def make(self, draw: random.Random, number: int, place: Path) -> Case:
        return Case(number, place, 0, {"text": draw.randbytes(4)}, frozenset({"text"}), "planted")

    def read(self, case: Case) -> None:
        if case.number == 1:
            self.wrong(case)

    def wrong(self, case: Case) -> None:
        """Do nothing; subclasses fail here."""


class Good(Planted):
    def wrong(self, case: Case) -> None:
        raise DataError("the file is damaged: replace it")


class Hangs(Planted):
    def wrong(self, case: Case) -> None:
        time.sleep(60)


class Crashes(Planted):
    def wrong(self, case: Case) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


class Exits(Planted):
    def wrong(self, case: Case) -> None:
        os._exit(3)


class RaisesAnother(Planted):
    def wrong(self, case: Case) -> None:
        raise KeyError("label")


class EatsMemory(Planted):
    def wrong(self, case: Case) -> None:
        bytearray(b"x") * (2 << 30)


class AsksForMemory(Planted):
    def wrong(self, case: Case) -> None:
        try:
            bytearray(100 << 30)
        except MemoryError:
            raise DataError("the file is damaged") from None


class StartsAProgram(Planted):
    def wrong(self, case: Case) -> None:
        subprocess.run(["true"], check=True)


class StartsAStub(Planted):
    def wrong(self, case: Case) -> None:
        os.spawnlp(os.P_WAIT, "gs", "gs", "--version")


class WritesElsewhere(Planted):
    def wrong(self, case: Case) -> None:
        (case.place.parent / "elsewhere").write_text("x")


class TellsAnAddress(Planted):
    def wrong(self, case: Case) -> None:
        raise DataError(f"cannot read <object at {0x7F12AB34CD56:#x}>")


class TellsTooMuch(Planted):
    def wrong(self, case: Case) -> None:
        raise DataError("x" * 2_000)


class CannotBeMade(Planted):
    def make(self, draw: random.Random, number: int, place: Path) -> Case:
        if number == 1:
            raise RuntimeError("the attack itself is wrong")
        return super().make(draw, number, place)


class RefusesItsSeed(FileTarget):
    what = "nothing"

    def __init__(self, home: Path) -> None:
        self.seeds = [{"file": b"seed"}]

    def read(self, case: Case) -> None:
        raise DataError("the file is damaged: replace it")


class ChangesSilently(FileTarget):
    """Reader of a file whose second half has no checksum; the oracle knows the correct content."""

    what = "nothing"

    def __init__(self, home: Path) -> None:
        self.seeds = [{"file": bytes(range(64))}]

    def read(self, case: Case) -> None:
        data = (case.place / "file").read_bytes()
        seed = self.seeds[0]["file"]
        if data[:32] != seed[:32]:
            raise DataError("the file is damaged: replace it")
        if data != seed:
            raise oracle.Wrong("its bytes are not what was written, and nothing is said")
