"""Profiles and clusters from untrusted sources: absurd values are refused quickly, with a short error."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.command_line import refusal
from helpers.galvatron_2022 import vit_huge_32, write_profiles
from vitpar.errors import PlannerError, StrategyError, UserError
from vitpar.limits import MAX_QUOTED_CHARS
from vitpar.planner.profile.cluster import find_cluster
from vitpar.planner.profile.galvatron import import_model
from vitpar.planner.profile.profiles import Hardware

pytestmark = pytest.mark.timeout(30)


def refused(make: Callable[[], Any], message: str, kind: type[UserError] = PlannerError) -> None:
    with pytest.raises(kind, match=message) as caught:
        make()
    said = str(caught.value)
    assert len(said) < 3 * MAX_QUOTED_CHARS + 400 and "\n" not in said


HARDWARE = json.loads(find_cluster("2xH100").hardware().model_dump_json(by_alias=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 10**9}, "ranks: Input should be less than or equal to 65536"),
        ({"format": "vitpar hardware 9"}, "format: Input should be 'vitpar hardware 2'"),
        ({"links": [{"operation": "all_reduce"}]}, "links.0.timings: "),
        ({"pipeline": float("nan")}, "pipeline: Input should be a finite number"),
        ({"overlap": {"compute": 1e300, "communication": 1}}, "overlap.compute: Input should be less than"),
        ({"copy": {"timings": [{"size": 1, "seconds": 1e-320, "spread": 0, "samples": 1}]}}, "copy.timings.0.seconds"),
        ({"x" * 10**6: 1}, "unknown key 'x{198}…'"),
    ],
)
def test_invalid_hardware_profiles_are_refused_by_key(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    path.write_text(json.dumps(HARDWARE | change))
    refused(lambda: Hardware.read(path), f"is not a hardware profile, {message}")


def test_profile_with_an_invalid_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hardware.json").write_text(json.dumps(HARDWARE))
    write_profiles(tmp_path)
    profile = json.loads(import_model(tmp_path, vit_huge_32(), "fp32").model_dump_json())
    large = ({"depth": 10**9}, "depth of .* is 1000000000: it must be")
    for change, message in (large, ({"x": 1}, "unknown model field 'x'")):
        (tmp_path / "model.json").write_text(json.dumps(profile | {"model": profile["model"] | change}))
        words = f"search --hardware {tmp_path}/hardware.json --model-profile {tmp_path}/model.json"
        said = refusal(words.split(), monkeypatch, capsys)
        assert re.search(f"does not describe a valid model: {message}", said), said


CLUSTER = """
nodes = 2
devices_per_node = 4
device_name = "mine"
memory_bytes = 16_000_000_000
memory_bandwidth = 1e12
sustained = 0.5
matmul = { fp32 = 1e13 }
intra = { bandwidth = 1e11, latency = 1e-6 }
inter = { bandwidth = 1e10, latency = 1e-5 }
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nodes = 2", "nodes = 999999999", "nodes: Input should be less than or equal to 65536"),
        ("nodes = 2", "nodes = 2\nspeed = 1", "is not a valid cluster file, unknown key 'speed'"),
        ("nodes = 2", f"nodes = {'9' * 5_000}", "is not a valid cluster file: Exceeds the limit"),
        ("memory_bandwidth = 1e12", "memory_bandwidth = nan", "memory_bandwidth: Input should be"),
        ("latency = 1e-5", "latency = 1e-5, nics_per_node = 0", "inter.nics_per_node: Input should be greater than"),
        ("nodes = 2", "nodes = " + "[" * 100_000, "it is nested too deeply"),
    ],
)
def test_oversized_clusters_are_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(CLUSTER)
    assert find_cluster(str(path)).hardware().ranks == 8
    path.write_text(CLUSTER.replace(old, new, 1))
    refused(lambda: find_cluster(str(path)), message)


def test_too_many_devices_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(CLUSTER.replace("= 2", "= 65536").replace("= 4", "= 65536"))
    refused(lambda: find_cluster(str(path)).hardware(), "4,294,967,296 ranks: use at most 65,536", StrategyError)
    assert find_cluster(str(path)).hardware(16).ranks == 16
    refused(lambda: find_cluster("99999x99xH100"), "9,899,901 ranks: use at most 65,536", StrategyError)
    refused(lambda: find_cluster("٣xH100"), "unknown cluster '٣xH100'")
    refused(lambda: find_cluster("8x" + "H" * 10**6), "unknown cluster '8xH+…'")


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"1": float("inf")}, "no layertype_0 of 196 tokens with times and, for degree 1, activations"),
        ({"1": 1.0, "999999999": 1.0}, "the degree of 'tp' is 999999999 .*: use 1 to 65,536"),
        ({"²": 1.0}, "no layertype_0 of 196 tokens with times and, for degree 1, activations"),
    ],
)
def test_oversized_galvatron_memory_is_refused(degrees: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_profiles(tmp_path)
    path = tmp_path / "memory_profiling_fp32_all.json"
    found = json.loads(path.read_text())
    found["layertype_0_sp"]["196"]["tp_activation_per_bsz_dict"] = degrees
    path.write_text(json.dumps(found))
    refused(lambda: import_model(tmp_path, vit_huge_32(), "fp32"), message, UserError)
