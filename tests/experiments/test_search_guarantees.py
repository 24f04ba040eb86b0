"""The search with the effort that ships, on drawn clusters, beside every plan with one strategy."""

import subprocess
import sys

import pytest


def run(first: int, clusters: int) -> subprocess.CompletedProcess[str]:
    command = ["experiments/search_guarantees.py", "--first", str(first), "--clusters", str(clusters)]
    return subprocess.run([sys.executable, *command], capture_output=True, text=True)


@pytest.mark.parametrize("first", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_a_search_is_never_slower_than_a_simple_plan(first: int) -> None:
    found = run(first, 4)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "searches: 12" in found.stdout


@pytest.mark.slow
@pytest.mark.parametrize("first", range(8, 200, 16))
def test_two_hundred_clusters(first: int) -> None:
    found = run(first, 16)
    assert found.returncode == 0, found.stdout + found.stderr
