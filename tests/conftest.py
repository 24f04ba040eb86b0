"""Fixtures shared by several test files."""

import os
import shlex
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from helpers import command_line
from helpers.browser import Browser, browser
from helpers.command_line import Command, Refused, refusal, run, stop_servers
from helpers.ranks import RankPool
from helpers.small_data import pack_small
from vitpar.launch import ALONE, join, leave

# `--hypothesis-profile first` reports the first counterexample: searching for a shorter one can take minutes.
settings.register_profile("patient", deadline=None)  # a busy machine is slow, not wrong
settings.load_profile("patient")
settings.register_profile("first", phases=(Phase.explicit, Phase.generate), deadline=None)


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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start the tests with the longest time limits first: the end of a run does not wait for one of them."""
    usual = int(config.getini("timeout"))

    def limit(item: pytest.Item) -> int:
        mark = item.get_closest_marker("timeout")
        return max(usual, mark.args[0]) if mark else usual

    items.sort(key=limit, reverse=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """Leave a process group that a test left behind, and fail that test rather than those after it."""
    yield
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
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Chromium that runs."""
    with browser(tmp_path_factory.mktemp("chromium")) as started:
        yield started
