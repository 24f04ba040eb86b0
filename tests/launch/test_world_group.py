"""CPU tensors and JSON use a separate gloo group if the default group accepts only CUDA tensors."""

import json
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.command_line import clean_environment
from helpers.small_data import pack_small
from vitpar.launch import World, join, leave
from vitpar.launch.world_group import all_gather_json, barrier, broadcast_json, cpu_group

CUDA_ONLY = """
import sys
import torch.distributed as dist

init = dist.init_process_group
# Stands for NCCL: a default group that refuses CPU tensors. Groups that are made later inherit its backend.
dist.init_process_group = lambda backend, **settings: init("cuda:gloo", **settings)
"""
COMMAND = f"{CUDA_ONLY}\nfrom vitpar_cli.main import main\nsys.exit(main())\n"
RANK = f"""{CUDA_ONLY}
from pathlib import Path
import torch
from vitpar.checkpoint import Writer, load_tensors
from vitpar.launch import find_world, join, leave
from vitpar.launch.world_group import all_gather_json, barrier, broadcast_json

world = find_world()
join(world, "cpu", timeout=60.0)
barrier()
assert all_gather_json({{"rank": world.rank}}) == [{{"rank": 0}}, {{"rank": 1}}]
assert broadcast_json(("from", world.rank)) == ["from", 0]
place, tensors = Path(sys.argv[1], "step"), {{"all": torch.arange(4.0), f"of{{world.rank}}": torch.ones(3)}}
writer = Writer()
writer.begin(place, tensors, {{}})
writer.finish()
read = {{name: torch.zeros_like(tensor) for name, tensor in tensors.items()}}
load_tensors(place, read)
assert all(torch.equal(read[name], tensors[name]) for name in tensors)
try:
    dist.all_reduce(torch.ones(1))
except RuntimeError as error:
    print(error)
leave()
"""


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch, environment: None) -> list[dict[str, Any]]:
    """Simulate two GPUs: record the arguments of `init_process_group`, and create a group of one gloo rank."""
    init, given = dist.init_process_group, list[dict[str, Any]]()

    def record(backend: str, **settings: Any) -> None:
        given.append({"backend": backend, **settings})
        devices = backend if backend == "gloo" else "cuda:gloo"
        init(devices, store=dist.HashStore(), rank=0, world_size=1)
        if settings["device_id"] is not None:
            dist.group.WORLD.bound_device_id = settings["device_id"]  # as init_process_group does for NCCL

    monkeypatch.setattr(dist, "init_process_group", record)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    return given


def test_several_gpus_get_nccl_and_one_gloo_group(two_gpus: list[dict[str, Any]]) -> None:
    join(World(1, 2, 1, 2, "torchrun", "127.0.0.1", 29500), "cuda", timeout=77.0)
    (given,) = two_gpus
    assert (given["backend"], given["device_id"]) == ("nccl", torch.device("cuda", 1))
    assert (given["rank"], given["world_size"], given["timeout"]) == (1, 2, timedelta(seconds=77))
    group = cpu_group()
    assert group is not dist.group.WORLD and group is cpu_group()
    assert dist.get_backend(group) == "gloo" and len(dist.distributed_c10d._world.pg_map) == 2
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)
    leave()


def test_one_gpu_starts_no_nccl(two_gpus: list[dict[str, Any]]) -> None:
    join(World(0, 1, 0, 1, "none"), "cuda")
    (given,) = two_gpus
    assert (given["backend"], given["device_id"], given["init_method"]) == ("gloo", None, None)
    assert cpu_group() is dist.group.WORLD
    leave()


def test_new_world_gets_a_new_group(two_gpus: list[dict[str, Any]]) -> None:
    """The cached group of a world that has ended must not be used again."""
    for _ in range(2):
        join(World(0, 2, 0, 2, "torchrun", "127.0.0.1", 29500), "cuda")
        barrier()
        assert (all_gather_json(3), broadcast_json("a")) == ([3], "a")
        leave()


def test_json_and_checkpoints_work_with_a_cuda_only_default_group(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path)],
            env={**clean_environment(), **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        printed, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors
        assert "No backend type associated with device type cpu" in printed


def run(place: Path, *words: str) -> None:
    """Run COMMAND in a new process."""
    command, env = [sys.executable, "-c", COMMAND, *words], clean_environment()
    done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("mesh", ["dp1+offload", *(pytest.param(m, marks=pytest.mark.slow) for m in ("dp1", "fsdp1"))])
def test_one_rank_sends_no_tensor(mesh: str, tmp_path: Path) -> None:
    """A single GPU needs no NCCL, so any collective on a tensor would fail here."""
    data = pack_small(tmp_path)
    sizes = {"image_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "drop_path": 0.1}
    settings = [f"--set=model.{key}={value}" for key, value in sizes.items()]
    settings += ["--set=train.ema_decay=0.9", "--set=checkpoint.every_steps=2", "--set=faults.non_finite=skip"]
    common = ("--data", str(data), "--model", "vit_custom", *settings, "--batch-size", "8", "--device", "cpu")
    words = ("train", *common, "--mesh", mesh, "--steps", "4", "--run-dir", "run")
    for arguments in (words, ("train", "--resume", "run/checkpoints/step_2", "--run-dir", "on", "--device", "cpu")):
        run(tmp_path, *arguments)
    rows = map(json.loads, (tmp_path / "on" / "metrics.jsonl").read_text().splitlines())
    assert [row["step"] for row in rows if row["kind"] == "train"] == [3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["check", "bench"])
def test_check_and_bench_on_one_rank_send_no_tensor(command: str, tmp_path: Path) -> None:
    small = ["--steps", "2", "--repeats", "2", "--warmup", "1"] if command == "bench" else []
    words = [command, "--mesh", "dp1", "--model", "vit_nano_patch4_16", "--batch-size", "8", "--device", "cpu", *small]
    run(tmp_path, *words, "--json")
