"""Readers with planted faults, for the tests of the fuzzing harness."""

import os
import signal
import subprocess
import time
from pathlib import Path

from fuzzing import oracle
from fuzzing.case import Case, Target
from vitpar.errors import DataError


class Planted(Target):
    """Reader of a file that holds SEED; it calls `wrong` for any other content."""

    SEED = b"seed"

    def make(self, home: Path) -> None:
        self.seeds = [{"file": self.SEED}]

    def read(self, case: Case, place: Path) -> None:
        data = case.files["file"]
        if data != self.SEED:
            self.wrong(place, data if isinstance(data, bytes) else b"")

    def wrong(self, place: Path, data: bytes) -> None:
        """Refuse it; subclasses fail here."""
        raise DataError("the file is damaged: replace it")


class Hangs(Planted):
    def wrong(self, place: Path, data: bytes) -> None:
        time.sleep(60)


class Crashes(Planted):
    def wrong(self, place: Path, data: bytes) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


class Exits(Planted):
    def wrong(self, place: Path, data: bytes) -> None:
        os._exit(3)


class RaisesAnother(Planted):
    def wrong(self, place: Path, data: bytes) -> None:
        raise KeyError("label")


class StartsAProgram(Planted):
    def wrong(self, place: Path, data: bytes) -> None:
        subprocess.run(["true"], check=True)


class StartsAStub(Planted):
    def wrong(self, place: Path, data: bytes) -> None:
        os.spawnlp(os.P_WAIT, "gs", "gs", "--version")


class WritesElsewhere(Planted):
    def wrong(self, place: Path, data: bytes) -> None:
        (place.parent / "elsewhere").write_text("x")


class Connects(Planted):
    def wrong(self, place: Path, data: bytes) -> None:
        import socket

        with socket.socket() as connection:
            connection.connect_ex(("127.0.0.1", 1))


class TellsAnAddress(Planted):
    def wrong(self, place: Path, data: bytes) -> None:
        raise DataError(f"cannot read <object at {0x7F12AB34CD56:#x}>")


class TellsTooMuch(Planted):
    def wrong(self, place: Path, data: bytes) -> None:
        raise DataError("x" * 2_000)


class AcceptsDamage(Planted):
    def wrong(self, place: Path, data: bytes) -> None:
        raise oracle.Wrong("its bytes are not what was written, and nothing is said")


class RefusesItsSeed(Planted):
    def read(self, case: Case, place: Path) -> None:
        self.wrong(place, b"")


class CannotBeMade(Planted):
    def drawn(self, draw: object) -> Case:
        raise RuntimeError("the strategy itself is wrong")


class NeedsTheRightNumber(Planted):
    """Reader that fails if the second byte is larger than 200 and the file is longer than its seed."""

    SEED = b"a\0bcdefgh"

    def wrong(self, place: Path, data: bytes) -> None:
        if data[1:2] > b"\xc8" and len(data) > len(self.SEED):
            raise KeyError("label")
        raise DataError("the file is damaged: replace it")
