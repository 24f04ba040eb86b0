"""The search with its default effort on drawn clusters, compared with every plan that has a single strategy."""

import subprocess
import sys

import pytest


def run(first: int, clusters: int) -> subprocess.CompletedProcess[str]:
    command = ["experiments/search_guarantees.py", "--first", str(first), "--clusters", str(clusters)]
    return subprocess.run([sys.executable, *command], capture_output=True, text=True)


@pytest.mark.parametrize(
    "first, clusters",
    [(0, 1), *(pytest.param(n, 5, marks=mark) for n, mark in ((1, pytest.mark.slow), (6, pytest.mark.soak)))],
)
def test_search_is_never_slower_than_a_uniform_plan(first: int, clusters: int) -> None:
    """Runs 11 of the 200 clusters that `make bench-search` draws."""
    found = run(first, clusters)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count(f"% | {clusters} |") == 3
