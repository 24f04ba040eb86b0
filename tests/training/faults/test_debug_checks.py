"""`faults.debug_checks`: name the rank, step and tensor of a fault, and change nothing in a healthy run."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from helpers import trained
from helpers.ranks import Ranks, exits, two_ranks
from helpers.run_folder import rows_of
from vitpar import parse
from vitpar.errors import FaultError
from vitpar.recipe import Recipe
from vitpar.sharded import local
from vitpar.training.faults.debug_checks import checksums

WEIGHT = "blocks.1.mlp.fc1.weight"
ZBV = {"parallel.schedule": "zbvzerobubble", "parallel.virtual_stages": 2, "parallel.microbatches": 4}


def recipe_of(data: Path, mesh: str, **settings: Any) -> Recipe:
    values = {"train.steps": 3, "train.eval_every": 3, "train.batch_size": 8, "faults.debug_checks": True}
    return trained.recipe_of(data, mesh, **{**values, "checkpoint.every": None, **settings})


def train(device: torch.device, recipe: Recipe, folder: Path, wrong: str = "", rank: int = 0) -> str | None:
    """Train with the fault `wrong` on `rank` at step 2; return the error that stopped the run, or None.

    Runs on every rank.
    """
    trainer = trained.trainer_of(recipe, folder)
    parameters = dict(trainer.model.named_parameters())
    backward, step = trainer.model.forward_backward, trainer.step
    now = [0]

    def poke(tensor: Tensor, value: float | None = None) -> None:
        part = local(tensor.detach()).view(-1)
        if value is None:
            part.view(torch.int32)[3] ^= 1  # flip the last bit of the significand
        else:
            part[3] = value

    def spoilt_backward(*args: Any) -> Tensor:
        loss = backward(*args)
        if now[0] == 2 and trainer.rank == rank:
            if wrong == "missing":
                parameters[WEIGHT].grad = None
            if wrong == "gradient":
                poke(parameters[WEIGHT].grad, float("nan"))  # type: ignore[arg-type]
        return loss

    def spoilt_step(number: int, batch: Any) -> Any:
        now[0] = number
        result = step(number, batch)
        if number == 2 and trainer.rank == rank:
            if wrong == "bit":
                poke(parameters[WEIGHT])
            if wrong == "moment":
                poke(trainer.optimizer.state()[f"exp_avg.{WEIGHT}"])
            if wrong == "average":
                assert trainer.ema is not None
                poke(trainer.ema.average[WEIGHT])
            if wrong == "parameter":
                poke(parameters[WEIGHT], float("inf"))
        return result

    trainer.model.forward_backward, trainer.step = spoilt_backward, spoilt_step  # type: ignore[method-assign]
    try:
        trainer.run()
    except FaultError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        ("pp2xdp2", {"optimizer.name": "lamb"}),
        ("fsdp2+offload", {"optimizer.name": "muon"}),
        pytest.param("tp2xdp2+zero1", {"train.precision": "fp16"}, marks=pytest.mark.slow),
        pytest.param("pp2xtp2", ZBV, marks=pytest.mark.slow),
        pytest.param("pp2: embed=fsdp2, 0=tp2, *=dp2+ckpt", {}, marks=pytest.mark.slow),
        pytest.param("dp2xtp2+zero2", {"train.precision": "bf16", "data.bad_sample": "skip"}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_debug_checks_do_not_change_losses(
    mesh: str, settings: dict[str, Any], data: Path, tmp_path: Path, ranks: Ranks
) -> None:
    """The checks must be usable on a real run, under every kind of plan and optimizer."""
    for checked in (False, True):
        recipe = recipe_of(data, mesh, **settings, **{"faults.debug_checks": checked})
        size = recipe.requested_plans()[0].world_size
        assert ranks(size).run(train, recipe, tmp_path / str(checked)) == [None] * size
    plain, checked = (
        [(row["loss"], row["grad_norm"]) for row in rows_of(tmp_path / name)] for name in ("False", "True")
    )
    assert plain == checked


@pytest.mark.parametrize(
    ("mesh", "wrong", "rank", "sentence"),
    [
        ("pp2xdp2", "bit", 1, f"after step 2, {WEIGHT} differs between rank 0 and rank 1"),
        ("dp2xfsdp2", "bit", 2, f"after step 2, {WEIGHT} differs between rank 0 and rank 2"),
        ("dp2", "moment", 1, f"after step 2, optimizer.exp_avg.{WEIGHT} differs between rank 0 and rank 1"),
        ("dp2", "average", 0, f"after step 2, ema.{WEIGHT} differs between rank 0 and rank 1"),
        ("fsdp2", "parameter", 1, f"after step 2, {WEIGHT} on rank 1 is not finite"),
        ("fsdp2", "missing", 1, f"after backward of step 2, {WEIGHT} has no gradient on rank 1"),
        ("tp2", "gradient", 0, f"after backward of step 2, the gradient of {WEIGHT} on rank 0 is not finite"),
    ],
)  # fmt: skip
def test_fault_on_one_rank_is_named_on_every_rank(
    mesh: str, wrong: str, rank: int, sentence: str, data: Path, tmp_path: Path, ranks: Ranks
) -> None:
    """The faults are a flipped bit, a non-finite value, and a missing gradient on one rank."""
    for error in ranks(parse(mesh).world_size).run(train, recipe_of(data, mesh), tmp_path / "run", wrong, rank):
        assert error is not None and re.fullmatch(sentence, error), error


def differing(place: Path, data: Path) -> None:
    """Train a rank of dp2 by the command; rank 1 calls another collective in step 2."""
    from vitpar.training.trainer import Trainer
    from vitpar_cli.main import main

    step = Trainer.step

    def spoilt(self: Trainer, number: int, batch: Any) -> Any:
        if number == 2:
            dist.all_reduce(torch.ones(4 - self.rank))
        return step(self, number, batch)

    Trainer.step = spoilt  # type: ignore[method-assign]
    os.chdir(place)
    sizes = ("--model", "vit_nano_patch4_16", "--batch-size", "8", "--steps", "3", "--device", "cpu")
    sys.argv = ["vitpar", "train", "--mesh", "dp2", "--data", str(data), *sizes, "--debug-checks"]
    main()


def test_collectives_that_differ_are_named(data: Path, tmp_path: Path) -> None:
    for rank, (code, errors) in enumerate(exits(differing, two_ranks(), tmp_path, data)):
        assert code and "Detected mismatch between collectives on ranks" in errors, errors
        assert f"Rank {rank} is running collective" in errors and "TensorShape=[3]" in errors


def test_checksum_changes_with_values_and_their_order() -> None:
    def of(values: list[float], dtype: torch.dtype = torch.float32) -> int:
        return next(iter(checksums({"x": torch.tensor(values, dtype=dtype)}).values()))

    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        sums = {of(values, dtype) for values in ([1, 2, 3], [2, 1, 3], [1, 3, 2], [1, 2, 3.5], [0, 0, 0], [-0.0, 0, 0])}
        assert len(sums) == 6
    assert of([float("nan"), 1]) == of([float("nan"), 1])
    assert checksums({"empty": torch.empty(0)}) == {}
