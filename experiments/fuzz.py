"""Fuzz every reader of untrusted input (`fuzzing/readers.py`) with hypothesis.

    make fuzz                                                  # ten minutes, an even share for every reader
    make fuzz FUZZ="--minutes 60 --only image --only http"

hypothesis edits small valid files, shrinks a case that shows a fault, and keeps it in `.hypothesis/fuzz`, from where
the next run repeats it. A reader must accept a case or refuse it with one sentence, within LIMIT_S seconds. It must
not start programs, connect anywhere, or touch files outside its folder. Exit code 1: a fault was found.
"""

import argparse
import faulthandler
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, given, settings
from hypothesis.database import DirectoryBasedExampleDatabase

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))
os.environ["OMP_NUM_THREADS"] = "1"  # forked processes must not wait for threads of their parent

from fuzzing.edits import Case, edited  # noqa: E402
from fuzzing.readers import READERS, Reader, expect, write_files  # noqa: E402
from helpers.hostile_files import message_problem  # noqa: E402
from vitpar.errors import UserError  # noqa: E402

LIMIT_S = 30.0
"""Seconds of a case; a hanging reader ends its process, with the stacks of its threads."""
STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty")
CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.symlink", "os.link", "os.truncate", "shutil.rmtree")
CONNECTS = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname")  # curl connects in its own process


def watch(folder: Path) -> list[str]:
    """Return the list that an audit hook fills with what is forbidden, such as opening files outside the folder."""
    seen, allowed = list[str](), (f"{folder}/", "/dev/null", "/proc/")

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        is_wrong = event in CONNECTS or (event in STARTS and os.path.basename(str(arguments[0])) != "curl")
        if event in ("open", *CHANGES) and not isinstance(arguments[0], int):
            path, flags = os.path.abspath(os.fsdecode(arguments[0])), arguments[2] if event == "open" else os.O_WRONLY
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            is_wrong = path == "/etc/passwd" or bool(writes and not path.startswith(allowed))
        if is_wrong:
            seen.append(f"{event} {arguments!r:.300}")

    sys.addaudithook(look)
    return seen


def attack(reader: Reader, home: Path, seconds: float, cases: int) -> None:
    """Read cases in this process; raise the first fault, with the simplest case that shows it.

    home: new folder. cases: cases before hypothesis starts again with another seed; not if `seconds` is 0.
    """
    place, seeds, counts = home / "case", Path(f"{home} seeds") / "seeds", Counter[str]()
    seeds.mkdir(parents=True)
    reader.make(seeds)
    valid = [
        {str(path.relative_to(seed)): path.read_bytes() for path in sorted(seed.rglob("*")) if path.is_file()}
        for seed in sorted(seeds.iterdir())
    ]
    forbidden = watch(home)

    def read(case: Mapping[str, bytes]) -> Any:
        """Return the result of the reader; raise a fault, or a UserError for a good refusal."""
        shutil.rmtree(home, ignore_errors=True)
        write_files(place, case)
        os.chdir(place)
        forbidden.clear()
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        try:
            return reader.read(place)
        except UserError as error:
            expect(message_problem(error) is None, f"{message_problem(error)}")
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()
            expect(not forbidden, f"forbidden: {'; '.join(forbidden[:5])}")

    tempfile.tempdir = str(place)
    results = [read(files) for files in valid]
    right = [value for result in results for value in result] if reader.protected else []
    end = time.monotonic() + (seconds or 1e9)

    def check(case: Case) -> None:
        if time.monotonic() > end and not counts["faulty"]:  # a fault is shrunk even if the time is over
            return
        outcome = "faulty"
        try:
            result = read(case)
            expect(not reader.protected or all(value in right for value in result), "damage is not detected")
            outcome = "accepted"
        except UserError:
            outcome = "refused"
        finally:
            counts[outcome] += 1

    run = settings(
        max_examples=cases,
        database=DirectoryBasedExampleDatabase(ROOT / ".hypothesis" / "fuzz" / home.name),
        deadline=None,
        suppress_health_check=[*HealthCheck],
        report_multiple_bugs=False,
    )(given(edited(valid))(check))
    hypothesis.seed(0)(run)()
    while seconds and time.monotonic() < end:
        hypothesis.seed(counts.total())(run)()
    print(f"{counts['accepted']:,} cases accepted, {counts['refused']:,} refused")


def start(reader: Reader, home: Path, seconds: float, cases: int = 200) -> ForkProcess:
    """Start a process that attacks a reader and prints to `home`.txt. Exit code 0: no fault."""

    def work() -> None:
        sys.stdout = sys.stderr = open(f"{home}.txt", "w", buffering=1)  # noqa: SIM115, until the process ends
        os.dup2(sys.stderr.fileno(), 2)  # for libraries in C
        faulthandler.enable()
        sys.dont_write_bytecode = True  # readers import some modules when they need them
        warnings.simplefilter("ignore")
        attack(reader, home, seconds, cases)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


def main() -> int:
    """Attack the readers, `--parallel` at a time; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=READERS, metavar="NAME", help=f"of {', '.join(READERS)}")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all readers together (10)")
    parser.add_argument("--parallel", type=int, default=2, help="readers at a time (2)")
    options = parser.parse_args()
    names = options.only or [*READERS]
    seconds, faulty, running = 60 * options.minutes * options.parallel / len(names), [], dict[int, ForkProcess]()
    with tempfile.TemporaryDirectory(prefix="vitpar-fuzz-") as home:
        while names or running:
            while names and len(running) < options.parallel:
                process = start(READERS[names[0]], Path(home, names[0]), seconds)
                process.name, running[process.sentinel] = names.pop(0), process
            for process in [running.pop(ended) for ended in wait(running)]:  # type: ignore[call-overload]
                process.join()
                faulty += [process.name] * bool(process.exitcode)
                said = Path(home, f"{process.name}.txt").read_text(errors="backslashreplace").rstrip()
                print(f"{process.name}: {said}", f"\nexit code {process.exitcode}" * bool(process.exitcode), flush=True)
    print(f"faults: {', '.join(faulty) or 'none'}")
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
