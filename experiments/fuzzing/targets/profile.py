"""Target: files of clusters and profiles, in the formats of vitpar and Galvatron."""

from __future__ import annotations

import json
import random
from pathlib import Path

from fuzzing import oracle
from fuzzing.attacks.jsons import json_attack
from fuzzing.attacks.tomls import toml_attack
from fuzzing.target import Case, Files, FileTarget, tolerated
from vitpar.models import ViTConfig
from vitpar.planner.profile.cluster import find_cluster
from vitpar.planner.profile.estimate import estimate_model
from vitpar.planner.profile.galvatron import import_hardware, import_model
from vitpar.planner.profile.profiles import Hardware, ModelProfile

TINY = ViTConfig(
    "vit_tiny", patch_size=4, embed_dim=8, depth=2, num_heads=2, mlp_hidden_dim=16, image_size=8, num_classes=3
)
CLUSTER = b"""
name = "ours"
nodes = 2
devices_per_node = 4
device_name = "H100"
memory_bytes = 80000000000
memory_bandwidth = 3.3e12
sustained = 0.7
sources = ["a sheet"]
[matmul]
bf16 = 9.8e14
fp32 = 6e13
[intra]
bandwidth = 4.5e11
latency = 3e-6
[inter]
bandwidth = 5e10
latency = 8e-6
[overlap]
compute = 1.1
communication = 1.2
[host]
bandwidth = 5e10
memory_bandwidth = 2e10
"""
TOKENS = str(TINY.tokens)
GALVATRON = {
    "allreduce_bandwidth_1nodes_8gpus_per_node.json": {
        f"allreduce_size_{n}_consec_{c}": 100.5 for n in (2, 4, 8) for c in (0, 1)
    },
    "p2p_bandwidth_1nodes_8gpus_per_node.json": {f"pp_size_{n}": 50.5 for n in (2, 4, 8)},
    "sp_time_1nodes_8gpus_per_node.json": {f"allreduce_size_2_{n}MB_time": 0.1 * n for n in (1, 2, 4)},
    "overlap_coefficient.json": {"overlap_coe": 1.2},
    "computation_profiling_bf16.json": {f"layertype_{n}_bsz8_seq{TOKENS}": 0.5 for n in ("0", "other")},
    "memory_profiling_bf16.json": {
        "layertype_0": {
            TOKENS: {"parameter_size": 1.0, "tp_activation_per_bsz_dict": {"1": 2.0, "2": 1.0, "checkpoint": 0.1}}
        },
        "other_memory_pp_on_first": {TOKENS: {"activation": {"1": 2.0, "2": 1.0}}},
        "other_memory_pp_on_last": {TOKENS: {"activation": {"1": 2.0, "2": 1.0}}},
    },
}


class ProfileFiles(FileTarget):
    """Clusters and profiles, one kind of file in each seed."""

    what = "clusters in TOML, profiles in JSON, profiles of Galvatron's"
    tokens = (
        b"null",
        b"-1",
        b"1e999",
        b"{}",
        b"[]",
        b"0",
        b"999999999999",
        b"NaN",
        b"inf",
        b"nan",
        b'"',
        b"true",
        b"=",
        b"\n[x]\n",
    )

    def __init__(self, home: Path) -> None:
        (home / "cluster.toml").write_bytes(CLUSTER)
        hardware = find_cluster(str(home / "cluster.toml")).hardware()
        hardware.save(home / "hardware.json")
        estimate_model(TINY, "bf16", hardware, ("tp1", "tp2")).save(home / "model.json")
        self.seeds = [{name: (home / name).read_bytes()} for name in ("cluster.toml", "hardware.json", "model.json")]
        self.seeds.append({name: json.dumps(content).encode() for name, content in GALVATRON.items()})
        self.attacks = (_text,)

    def read(self, case: Case) -> None:
        match case.seed:
            case 0:
                cluster = find_cluster(str(case.place / "cluster.toml"))
                ranks = None if case.untouched else random.Random(case.number).choice((None, None, 1, 2, 8))
                tolerated(lambda: cluster.hardware(ranks))
            case 1:
                hardware = Hardware.read(case.place / "hardware.json")
                hardware.save(case.place / "again.json")
                if Hardware.read(case.place / "again.json") != hardware:
                    raise oracle.Wrong("a hardware profile reads back as another")
                for link in hardware.links[:20]:
                    link.seconds(1 << 20)
            case 2:
                model = ModelProfile.read(case.place / "model.json")
                model.save(case.place / "again.json")
                if ModelProfile.read(case.place / "again.json") != model:
                    raise oracle.Wrong("a model profile reads back as another")
                for layer in model.layers[:20]:
                    layer.forward.seconds(8)
            case _:
                import_hardware(case.place, 1, 8, 80 << 30, "H100")
                import_model(case.place, TINY, "bf16")


def _text(draw: random.Random, files: Files) -> str:
    name = draw.choice(sorted(files))
    content = files[name]
    assert isinstance(content, bytes)
    files[name], done = (toml_attack if name.endswith(".toml") else json_attack)(draw, content)
    return f"{name}: {done}"
