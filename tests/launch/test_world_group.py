"""Messages of ranks: CPU tensors and JSON over a gloo group of their own if the default one is for CUDA, no pickles."""

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.ranks import Ranks, in_forks, two_ranks
from helpers.run_folder import rows_of
from helpers.small_data import pack_small
from helpers.trained import recipe_of, train
from vitpar.checkpoint.reader import load_tensors
from vitpar.checkpoint.writer import Writer
from vitpar.launch import World, find_world, join, joined, leave, process_group
from vitpar.launch.world_group import all_gather_json, barrier, broadcast_json, cpu_group


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
    monkeypatch.setattr(process_group, "meeting_place", lambda world, seconds: dist.HashStore())
    monkeypatch.setattr(process_group, "roll_call", lambda store, world, seconds: None)
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
    join(World(0, 2, 0, 2, "torchrun", "127.0.0.1", 29500), "cuda")
    barrier()  # in a new group: the cached one belongs to the world that has ended
    assert (all_gather_json(3), broadcast_json("a")) == ([3], "a")
    leave()


def test_one_gpu_starts_no_nccl(two_gpus: list[dict[str, Any]]) -> None:
    join(World(0, 1, 0, 1, "none"), "cuda")
    (given,) = two_gpus
    assert (given["backend"], given["device_id"]) == ("gloo", None)
    assert cpu_group() is dist.group.WORLD
    leave()


@pytest.mark.parametrize("size", [1, 2])
def test_after_an_error_only_a_world_of_one_is_left(size: int, two_gpus: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError), joined(World(0, size, 0, size, "torchrun", "127.0.0.1", 29500), "cuda") as device:
        assert device == torch.device("cuda", 0) and os.environ["WORLD_SIZE"] == str(size)
        raise ValueError
    assert dist.is_initialized() == ("WORLD_SIZE" in os.environ) == (size == 2)
    leave()


def cuda_only() -> None:
    """Let `join` make a default group that refuses CPU tensors, as NCCL's. Later groups inherit its backend."""
    init = dist.init_process_group
    dist.init_process_group = lambda backend, **settings: init("cuda:gloo", **settings)  # type: ignore[assignment]


def exchanged(folder: Path) -> str:
    """Exchange JSON and a checkpoint; return the error of a collective on a CPU tensor in the default group."""
    cuda_only()
    world = find_world()
    assert world is not None
    join(world, "cpu", timeout=60.0)
    barrier()
    assert all_gather_json({"rank": world.rank}) == [{"rank": 0}, {"rank": 1}]
    assert broadcast_json(("from", world.rank)) == ["from", 0]
    tensors, writer = {"all": torch.arange(4.0), f"of{world.rank}": torch.ones(3)}, Writer()
    writer.begin(folder / "step", tensors, {})
    writer.finish()
    read = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load_tensors(folder / "step", read)
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    with pytest.raises(RuntimeError) as refused:
        dist.all_reduce(torch.ones(1))
    return str(refused.value)


def test_json_and_checkpoints_work_with_a_cuda_only_default_group(tmp_path: Path) -> None:
    for error in in_forks(exchanged, two_ranks(), tmp_path):
        assert "No backend type associated with device type cpu" in error


def commands(place: Path, *lines: tuple[str, ...]) -> None:
    """Run commands with a default group that refuses CPU tensors."""
    from vitpar_cli.main import main

    cuda_only()
    os.chdir(place)
    for words in lines:
        sys.argv = ["vitpar", *words]
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0, words


@pytest.mark.parametrize("mesh", ["dp1+offload", pytest.param("fsdp1", marks=pytest.mark.slow)])
def test_one_rank_sends_no_tensor(mesh: str, tmp_path: Path) -> None:
    """A single GPU needs no NCCL, so any collective on a tensor would fail here."""
    data = pack_small(tmp_path)
    sizes = {"image_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "drop_path": 0.1}
    settings = [f"--set=model.{key}={value}" for key, value in sizes.items()]
    settings += ["--set=train.ema_decay=0.9", "--set=checkpoint.every=2", "--set=faults.non_finite=skip"]
    common = ("--data", str(data), "--model", "vit_custom", *settings, "--batch-size", "8", "--device", "cpu")
    words = ("train", *common, "--mesh", mesh, "--steps", "4", "--run-dir", "run")
    resume = ("train", "--resume", "run/checkpoints/step_2", "--run-dir", "on", "--device", "cpu")
    in_forks(commands, [{}], tmp_path, words, resume)
    assert [row["step"] for row in rows_of(tmp_path / "on")] == [3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["check", "bench"])
def test_check_and_bench_on_one_rank_send_no_tensor(command: str, tmp_path: Path) -> None:
    small = ["--steps", "2", "--repeats", "2", "--warmup", "1"] if command == "bench" else []
    words = [command, "--mesh", "dp1", "--model", "vit_nano_patch4_16", "--batch-size", "8", "--device", "cpu", *small]
    in_forks(commands, [{}], tmp_path, (*words, "--json"))


# pickles, whose reading can run code, are never sent


VALUES = [None, True, 2**60, 1e-300, float("inf"), "é\ud800\n", [], {"a": [1, {"b": None}]}]


def refused(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a pickle is sent or read")


def trained(device: torch.device, data: Path, mesh: str, folder: Path) -> list[str]:
    """Train two steps while torch cannot send objects, then resume from a checkpoint.

    Return the names of the run's files.
    The run includes evaluation, debug checks and checkpoints.
    """
    settings = {"train.eval_every": 1, "checkpoint.every": 1, "train.steps": 2}
    settings |= {"faults.debug_checks": True, "faults.non_finite": "skip", "data.bad_sample": "skip"}
    recipe = recipe_of(data, mesh, **settings)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_object_to_tensor", "_tensor_to_object"):
            assert hasattr(dist.distributed_c10d, name)
            patch.setattr(dist.distributed_c10d, name, refused)
        for resume in (None, folder / "checkpoints" / "step_1"):
            where = folder if resume is None else folder.with_name("on")
            train(device, recipe, where, resume=resume)
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
def test_training_and_saving_send_no_pickles(tmp_path: Path, ranks: Ranks) -> None:
    mesh = "pp2: embed=dp2, 0-1=tp2, *=fsdp2"
    written = ranks(4).run(trained, pack_small(tmp_path), mesh, tmp_path / "run")
    assert {"checkpoints", "weights"} <= set(written[0])


def json_exchanged(device: torch.device) -> tuple[list[Any], Any]:
    rank = dist.get_rank()
    return all_gather_json([rank, VALUES * rank]), broadcast_json({"of": rank} if rank == 0 else object())


def test_json_values_arrive_unchanged(ranks: Ranks) -> None:
    """Values of different lengths arrive unchanged; a broadcast ignores the values of ranks other than 0."""
    for gathered, from_rank_0 in ranks(2).run(json_exchanged):
        assert gathered == [[0, []], [1, VALUES]] and from_rank_0 == {"of": 0}
        assert [type(value) for value in gathered[1][1]] == [type(value) for value in VALUES]
