"""Ranks never exchange pickles, because unpickling can run code."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.ranks import RankPool
from helpers.small_data import pack_small
from helpers.trained import recipe_of, train
from vitpar import parse
from vitpar.launch.world_group import all_gather_json, broadcast_json

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


@pytest.mark.parametrize("mesh", ["pp2xdp2", "tp2xfsdp2"])
def test_training_and_saving_send_no_pickles(mesh: str, tmp_path: Path, ranks: Callable[[int], RankPool]) -> None:
    told = ranks(parse(mesh).world_size).run(trained, pack_small(tmp_path), mesh, tmp_path / "run")
    assert {"checkpoints", "weights"} <= set(told[0])


def exchanged(device: torch.device) -> tuple[list[Any], Any]:
    rank = dist.get_rank()
    return all_gather_json([rank, VALUES * rank]), broadcast_json({"of": rank} if rank == 0 else object())


def test_json_values_arrive_unchanged(ranks: Callable[[int], RankPool]) -> None:
    """Values of different lengths arrive unchanged; a broadcast ignores the values of ranks other than 0."""
    for gathered, told in ranks(2).run(exchanged):
        assert gathered == [[0, []], [1, VALUES]] and told == {"of": 0}
        assert [type(value) for value in gathered[1][1]] == [type(value) for value in VALUES]
