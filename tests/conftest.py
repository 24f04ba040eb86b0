"""Fixtures shared by several test files."""

import gc
import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import Phase, settings

from helpers import command_line
from helpers.command_line import Command, Refused, refusal, run, stop_servers
from helpers.cpu_seconds import cpu_seconds
from helpers.ranks import RankPool
from helpers.small_data import pack_small
from vitpar.launch import ALONE, join, leave
from vitpar.models import FAMILIES

if TYPE_CHECKING:
    from playwright.sync_api import Browser

SECONDS = Path(__file__).with_name("seconds.json")
"""CPU seconds of each test that takes 0.1 or more, by its ID, with those of the processes that it starts."""

CPU = pytest.StashKey[float]()  # CPU seconds up to the end of the last test
QUICK_S, FIRST_S, FULL_S = 2.0, 3.0, 5.0
"""CPU seconds of one test function.

`make test` runs the rows that end within QUICK_S, and the first one within FIRST_S; further rows are slow. `make
test-full` runs those that begin within FULL_S; further rows are soak tests.
"""

# A busy machine is slow, not wrong: examples have no deadline. `--hypothesis-profile first` reports the first
# counterexample: searching for a shorter one can take minutes.
settings.register_profile("few", deadline=None, max_examples=25)
settings.register_profile("many", deadline=None)
settings.register_profile("first", deadline=None, phases=(Phase.explicit, Phase.generate))
settings.load_profile("few")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """Yield a function: ``ranks(8)`` returns the pool of 8 ranks.

    A pool starts at its first use, and again after a failure or when it has too many threads.
    """
    pools: dict[int, RankPool] = {}

    def pool(size: int) -> RankPool:
        for other in [size for size, started in pools.items() if started.alive and started.tired]:
            pools.pop(other).close()
        if size not in pools or not pools[size].alive:
            pools[size] = RankPool(size)
        return pools[size]

    yield pool
    for started in pools.values():
        started.close()


@pytest.fixture(scope="module", autouse=True)
def _environment_of_commands() -> None:
    """Give commands the session's environment, with changes that this test file makes, not those of other imports."""
    command_line.before_file = dict(os.environ)


@pytest.fixture(autouse=True)
def _families() -> Iterator[None]:
    """Forget the models of one's own that a test registers: another test expects them to be unknown."""
    before = dict(FAMILIES)
    yield
    FAMILIES.clear()
    FAMILIES.update(before)


@pytest.fixture
def environment() -> Iterator[None]:
    """Restore the environment after the test, because joining a world writes its variables."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def alone(environment: None) -> Iterator[None]:
    """Join a process group that has only this process."""
    join(ALONE, "cpu")
    yield
    leave()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a packed data set."""
    return pack_small(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Return a folder with packed data, and the test file's RECIPE if it has one, to run commands in."""
    folder = tmp_path_factory.mktemp("place")
    pack_small(folder).rename(folder / "data")
    if recipe := getattr(request.module, "RECIPE", None):
        (folder / "recipe.toml").write_text(recipe)
    return folder


@pytest.fixture(scope="module")
def vitpar(place: Path) -> Command:
    """Return a function that runs `vitpar <words>` in the module's folder `place`, behind `launcher` if given."""
    return lambda *words, launcher=(): run(place, words, launcher)


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Return a function of rows (words, sentence): each `vitpar <start> <words>` is refused with its sentence."""

    def check(place: Path, rows: Iterable[tuple[Iterable[str], str]], *start: str) -> None:
        monkeypatch.chdir(place)
        for words, sentence in rows:
            try:
                assert sentence in refusal([*start, *words], monkeypatch, capsys)
            except BaseException as error:
                error.add_note(f"the row is: vitpar {shlex.join([*start, *words])}")
                raise

    return check


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that records seconds."""
    parser.addoption("--record-seconds", action="store_true", help=f"write the CPU seconds of tests to {SECONDS.name}")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is not to run
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the rows of test functions that come too late for a command, and start the files that take longest first.

    Tests of a file share what its fixtures make, so they stay together. No row is marked while seconds are recorded.
    """
    seconds, functions, files = json.loads(SECONDS.read_text()), Counter[tuple[str, str]](), Counter[Path]()
    for item in sorted(items, key=lambda item: item.get_closest_marker("slow") is not None):
        taken, function = seconds.get(item.nodeid, 0.0), item.nodeid.partition("[")[0]
        files[item.path] += taken
        for mark in () if config.getoption("--record-seconds") else ("slow", "soak"):
            if not any(map(item.get_closest_marker, (mark, "soak", "each_row"))):
                begun = functions[function, mark]
                functions[function, mark] += taken
                ends_late = begun + taken > (QUICK_S if begun else FIRST_S)
                if ends_late if mark == "slow" else begun > FULL_S:
                    item.add_marker(mark)
    items.sort(key=lambda item: -files[item.path])
    gc.freeze()  # a collection of garbage then does not visit the objects of all modules
    if items:
        items[0].session.stash[CPU] = cpu_seconds()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Record the seconds of the tests that ran, if that is wanted."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not session.config.getoption("--record-seconds"):
        return
    spent = Counter[str]()
    for report in (report for kind in ("", "failed", "error") for report in reporter.stats.get(kind, ())):
        spent[report.nodeid] += dict(report.user_properties).get("cpu", 0.0)
    seconds = json.loads(SECONDS.read_text()) | {nodeid: round(cpu, 1) for nodeid, cpu in spent.items()}
    kept = {nodeid: cpu for nodeid, cpu in sorted(seconds.items()) if cpu}
    SECONDS.write_text(json.dumps(kept, indent=0) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """Note a test's CPU seconds, if wanted; fail it if it left a process group behind, rather than those after it."""
    yield
    if item.config.getoption("--record-seconds"):
        before, item.session.stash[CPU] = item.session.stash.get(CPU, 0.0), cpu_seconds()
        item.user_properties.append(("cpu", item.session.stash[CPU] - before))
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        leave()
        pytest.fail(f"{item.nodeid} left its process group behind", pytrace=False)


def pytest_unconfigure() -> None:
    """Stop the server of commands."""
    stop_servers()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the command that repeats each failed test."""
    failed = [*terminalreporter.stats.get("failed", ()), *terminalreporter.stats.get("error", ())]
    if failed:
        terminalreporter.section("repeat what failed")
    for nodeid in dict.fromkeys(report.nodeid for report in failed):
        terminalreporter.write_line(shlex.join([os.path.relpath(sys.executable), "-m", "pytest", nodeid]))


@pytest.fixture(scope="module")
def chrome() -> Iterator["Browser"]:
    """Chromium that runs."""
    from helpers.browser import browser

    with browser() as started:
        yield started
