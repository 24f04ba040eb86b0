"""Cores and memory of a rank on its machine."""

from pathlib import Path

import pytest

from vitpar.launch import local_ranks
from vitpar.launch.local_ranks import _left, _placed, _ranges


def says(name: str, *cores: list[int], processes: int = 1) -> dict[str, object]:
    """Return what a rank says of itself."""
    return {"machine": name, "processes": processes, "cores": list(cores)}


@pytest.mark.parametrize(
    ("ranks", "rank", "cores"),
    [
        ([says("a", [0, 191])] * 8, 3, 24),
        ([says("a", [24 * n, 24 * n + 23]) for n in range(8)], 3, 24),  # bound to cores of its own, as by srun
        ([says("a", [96 * (n // 4), 96 * (n // 4) + 95]) for n in range(8)], 5, 24),  # bound to a NUMA node
        ([says("a", [0, 15]), says("b", [0, 15]), says("a", [0, 15])], 1, 16),  # other machines do not count
        ([says("a", [0, 1], [8, 9]), says("a", [8, 11])], 0, 3),
        ([says("a", [0, 1])] * 8, 7, 0.25),
        ([says("a", [0, 15], processes=n) for n in range(4)], 2, 4),  # containers of one machine share its cores
    ],
)
def test_cores_are_divided_among_the_ranks_that_may_use_them(
    ranks: list[dict[str, object]], rank: int, cores: float
) -> None:
    assert _placed(ranks, rank).cores == pytest.approx(cores)


def test_ranks_of_one_container_share_files() -> None:
    ranks = [says("a", [0, 1]), says("b", [0, 1]), says("a", [0, 1], processes=2), says("a", [0, 1])]
    assert [_placed(ranks, rank).ranks for rank in range(4)] == [(0, 3), (1,), (2,), (0, 3)]
    assert [_placed(ranks, rank).size for rank in range(4)] == [3, 1, 3, 3]


def test_cores_are_sent_as_ranges() -> None:
    assert _ranges([0, 1, 2, 5, 7, 8]) == [[0, 2], [5, 5], [7, 8]]
    assert _ranges([3]) == [[3, 3]]


def test_memory_is_limited_by_every_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ranks, "_CGROUPS", tmp_path)
    job = tmp_path / "job"
    task = job / "task"
    task.mkdir(parents=True)
    for group, most, used, idle in ((job, "1000", 700, 100), (task, "max", 300, 0)):
        (group / "memory.max").write_text(f"{most}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 5\ninactive_file {idle}\nslab 3\n")
    assert list(_left("0::/job/task\n")) == [400]
    (task / "memory.max").write_text("350\n")
    assert list(_left("12:cpu:/other\n0::/job/task\n")) == [50, 400]
    assert list(_left("0::/gone\n")) == [], "a container sees its own group at the root, here without a limit"
