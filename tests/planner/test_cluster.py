"""Clusters from data sheets: names, files, and what their links take."""

from pathlib import Path

import pytest

from vitpar.errors import PlannerError
from vitpar.planner.cost.links import Group, Links
from vitpar.planner.profile.cluster import find_cluster


def test_names_say_nodes_and_devices() -> None:
    one, many = find_cluster("8xH100"), find_cluster("32x8xh200")
    assert (one.nodes, one.devices_per_node, many.nodes, many.devices_per_node) == (1, 8, 32, 8)
    assert many.hardware().ranks == 256 and many.hardware(64).ranks == 64
    assert all(cluster.sources for cluster in (one, many, find_cluster("8xA100")))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("8xH10", r"unknown cluster '8xH10' \(did you mean 'H100'\?\): use a TOML file"),
        ("H100", "unknown cluster 'H100'"),
        ("0xH100", "has no devices"),
        ("none.toml", "cannot read the cluster none.toml: No such file"),
    ],
)
def test_unknown_names_are_refused(name: str, sentence: str) -> None:
    with pytest.raises(PlannerError, match=sentence):
        find_cluster(name)


def test_a_file_is_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    text = """
nodes = 2
devices_per_node = 4
device_name = "mine"
memory_bytes = 16_000_000_000
memory_bandwidth = 1e12
sustained = 0.5
matmul = { bfloat16 = 1e14 }
intra = { bandwidth = 1e11, latency = 1e-5 }
"""
    path.write_text(text)
    cluster = find_cluster(str(path))
    assert cluster.name == "mine" and cluster.hardware(4).ranks == 4
    with pytest.raises(PlannerError, match="has several nodes but no inter"):
        cluster.hardware()
    with pytest.raises(PlannerError, match="9 ranks do not fit the 8 devices"):
        cluster.hardware(9)
    path.write_text(text + "speed = 1\n")
    with pytest.raises(PlannerError, match=r"mine.toml is not a cluster, unknown key 'speed'"):
        find_cluster(str(path))


def test_links_between_nodes_are_slower_and_shared() -> None:
    links = Links(find_cluster("4x8xH100").hardware())
    size = 10**9
    within, across = (links.seconds("all_reduce", group, size) for group in (Group(8, 1, 1), Group(16, 1, 2)))
    assert within < across < 2 * within  # 8 wires of a node together
    strided = links.seconds("all_reduce", Group(4, 8, 4), size)
    assert strided > 4 * links.seconds("all_reduce", Group(4, 1, 1), size)  # one wire
    for operation in ("all_gather", "reduce_scatter", "all_to_all"):
        assert links.seconds(operation, Group(8, 1, 1), size) < within
