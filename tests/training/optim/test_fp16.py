"""fp16 training: skipped steps after an overflow, agreement with fp32, and the dtype in which gradients are reduced."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import trained
from helpers.parity import check
from helpers.ranks import RankPool
from helpers.run_folder import rows_of
from vitpar import model_config, parse, validate
from vitpar.check import CheckResult
from vitpar.errors import RecipeError
from vitpar.sharded import local
from vitpar.training.recipe import Recipe

FP16_LOSS = 2e-3
"""Relative tolerance of losses after a few fp16 steps. fp16 has 11 significant bits (5e-4); seen: 4e-4 to 1.1e-3."""

# training


def recipe_of(data: Path, mesh: str, **settings: Any) -> Recipe:
    values = {"train.batch_size": 8, "train.eval_every": 6, "train.precision": "fp16", "model.init": "timm"}
    return trained.recipe_of(data, mesh, **{**values, "checkpoint.every": None, **settings})


class Watch:
    """A trainer that records, for each step, which of this rank's tensors changed.

    spoil: value written into one gradient element after the reduction, on rank `rank`, in the steps `steps`
    """

    def __init__(self, recipe: Recipe, folder: Path, spoil: float | None, rank: int, steps: tuple[int, ...]) -> None:
        self.trainer = trained.trainer_of(recipe, folder)
        self.seen: list[dict[str, Any]] = []
        self._spoil, self._rank, self._steps = spoil, rank, steps
        self._real = self.trainer.step
        self._backward = self.trainer.model.forward_backward
        self.trainer.step = self._step  # type: ignore[method-assign]
        self.trainer.model.forward_backward = self._spoilt  # type: ignore[method-assign]

    def _spoilt(self, *args: Any) -> Tensor:
        loss = self._backward(*args)
        if self._number in self._steps and self.trainer.rank == self._rank and self._spoil is not None:
            gradients = [local(p.grad) for _, p in self.trainer.model.named_parameters() if local(p.grad).numel()]
            gradients[-1].view(-1)[0] = self._spoil
        return loss

    def _step(self, number: int, batch: Any) -> Any:
        self._number = number
        before, scale = self._kept(), self.trainer.scaler.scale if self.trainer.scaler else None
        result = self._real(number, batch)
        after = self._kept()
        equal = [torch.equal(old, new) for old, new in zip(before, after, strict=False)]
        same = len(before) == len(after) and all(equal)  # the first update creates the optimizer state
        finite = all(bool(value.isfinite().all()) for value in after)
        dropped = all(p.grad is None for _, p in self.trainer.model.named_parameters() if local(p).numel())
        self.seen.append(
            {"same": same, "changed": not any(equal), "finite": finite, "dropped": dropped, "scale": scale}
        )
        return result

    def _kept(self) -> list[Tensor]:
        """Return copies of this rank's non-empty parameters, their moving averages and the optimizer state."""
        trainer = self.trainer
        kept = [local(p.detach()) for _, p in trainer.model.named_parameters()]
        kept += list(trainer.ema.average.values()) if trainer.ema else []
        states = trainer.optimizer.torch_optimizer.state.values()
        kept += [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return [value.clone() for value in kept if value.numel()]


def watched(
    device: torch.device,
    recipe: Recipe,
    folder: Path,
    spoil: float | None = None,
    rank: int = 0,
    steps: tuple[int, ...] = (),
) -> tuple[list[dict[str, Any]], str | None]:
    """Return the record of each step on this rank, and the error that stopped the run, if any; runs on every rank."""
    watch = Watch(recipe, folder, spoil, rank, steps)
    try:
        watch.trainer.run()
    except RecipeError as error:
        return watch.seen, str(error)
    return watch.seen, None


@pytest.mark.parametrize(
    ("mesh", "rank", "value"),
    [("dp2", 1, math.inf), ("tp2xfsdp2", 3, math.nan), ("pp2xdp2", 2, -math.inf)],
)
def test_overflow_on_one_rank_skips_the_step_on_all_ranks(
    mesh: str, rank: int, value: float, data: Path, tmp_path: Path, ranks: Callable[[int], RankPool]
) -> None:
    """A skipped step changes no parameter, average or optimizer state on any rank.

    The learning rate schedule counts it.
    """
    recipe = recipe_of(
        data,
        mesh,
        **{"loss_scale.initial_scale": 1024.0, "loss_scale.growth_interval": 2, "lr_schedule.warmup": 4},
    )
    pool = ranks(parse(mesh).world_size)
    for seen, error in pool.run(watched, recipe, tmp_path / "run", value, rank, (2, 3)):
        assert error is None
        assert [step["same"] for step in seen] == [False, True, True, False, False, False]
        assert [step["changed"] for step in seen] == [True, False, False, True, True, True]
        assert all(step["finite"] and step["dropped"] for step in seen)
        assert [step["scale"] for step in seen] == [1024, 1024, 1024, 512, 512, 1024]
    rows = rows_of(tmp_path / "run")
    assert [row["skipped"] for row in rows] == [False, True, True, False, False, False]
    assert [row["loss_scale"] for row in rows] == [1024, 1024, 1024, 512, 512, 1024]
    assert [row["grad_norm"] is None for row in rows] == [row["skipped"] for row in rows]
    assert [row["loss"] > 0 for row in rows] == [True] * 6  # the losses themselves were finite
    assert [row["lr"] for row in rows[:4]] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3])
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "skipped step 2: overflow under loss scale 1,024\n" in log and "skipped step 4" not in log


def test_fp16_losses_and_norms_match_fp32(data: Path, tmp_path: Path, ranks: Callable[[int], RankPool]) -> None:
    """A run with a slightly smaller learning rate must differ, which shows that the comparison is sensitive."""
    # SGD and clipping near the observed norms: with Adam, a wrong loss scale would cancel out of the updates.
    runs = {}
    for name, precision, lr in (("single", "fp32", 0.2), ("half", "fp16", 0.2), ("other", "fp32", 0.19)):
        settings = {"optimizer.name": "sgd", "optimizer.lr": lr, "train.clip_grad_norm": 1.9}
        settings |= {"train.steps": 12, "train.eval_every": 12, "train.precision": precision}
        recipe = recipe_of(data, "tp2", **settings)
        assert all(error is None for _, error in ranks(2).run(watched, recipe, tmp_path / name))
        runs[name] = rows_of(tmp_path / name)
    losses = {name: [row["loss"] for row in rows] for name, rows in runs.items()}
    assert losses["half"] == pytest.approx(losses["single"], rel=FP16_LOSS)
    assert losses["other"] != pytest.approx(losses["single"], rel=FP16_LOSS), "the steps hardly change the losses"
    norms = [[row["grad_norm"] for row in runs[name]] for name in ("half", "single")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)
    assert not any(key in row for row in runs["single"] for key in ("loss_scale", "skipped"))
    assert [row["loss_scale"] for row in runs["half"]] == [65536.0] * 12


@pytest.mark.parametrize(
    ("settings", "spoil", "last", "sentence"),
    [
        ({"initial_scale": 2.0, "hysteresis": 1}, math.nan, 3, "loss_scale.min_scale 1, so"),
        (
            {"dynamic": False, "initial_scale": 2.0**32, "hysteresis": 2},
            None,
            2,
            "loss_scale.initial_scale 4,294,967,296",
        ),
    ],
    ids=["smallest", "constant"],
)
def test_overflow_at_the_smallest_scale_stops_the_run(
    settings: dict[str, Any],
    spoil: float | None,
    last: int,
    sentence: str,
    data: Path,
    tmp_path: Path,
    ranks: Callable[[int], RankPool],
) -> None:
    """A scale that cannot fall further ends the run with one error line on every rank, not with endless skipping."""
    given = {f"loss_scale.{name}": value for name, value in settings.items()}
    recipe = recipe_of(data, "dp2", **given, **{"train.log_every": 100})
    steps = (2, 3, 4, 5, 6)
    for seen, error in ranks(2).run(watched, recipe, tmp_path / "run", spoil, 1, steps):
        assert error is not None and "\n" not in error
        assert error.startswith(f"float16 still overflows at step {last} with {sentence}")
        assert len(seen) == last
    assert [row["skipped"] for row in rows_of(tmp_path / "run")][1:] == [True] * (last - 1)
    assert "error: float16 still overflows" in (tmp_path / "run" / "log.txt").read_text()


# comparison with one process


def checked(device: torch.device, mesh: str, settings: dict[str, Any]) -> tuple[CheckResult, set[str]]:
    """Return the result of `check` for a plan, and the dtypes of FSDP's gradient reductions; runs on every rank."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    config = model_config("vit_nano_patch4_16", num_classes=10)
    plan = validate(replace(parse(mesh), microbatches=2), config, 16)
    seen: set[str] = set()
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single"):
            real = getattr(collectives.dist, kind, None)

            def spy(*args: Any, real: Any = real, **kwargs: Any) -> Any:
                tensor = kwargs.get("input", kwargs.get("tensor", args[-1] if args else None))
                if isinstance(tensor, Tensor) and tensor.numel() > 100:
                    seen.add(str(tensor.dtype).removeprefix("torch."))
                return real(*args, **kwargs)

            if real is not None:
                patch.setattr(collectives.dist, kind, spy)
        return check(config, plan, 16, device, **{"precision": "fp16", **settings}), seen


@pytest.mark.parametrize(
    ("mesh", "settings", "reduced"),
    [
        ("dp2", {}, "float32"),
        pytest.param("pp2", {}, None, marks=pytest.mark.slow),
        pytest.param("tp2xfsdp2", {}, None, marks=pytest.mark.slow),
        ("fsdp2", {"reduce_dtype": "fp16"}, "float16"),
        ("fsdp2", {"precision": "bf16", "reduce_dtype": "bf16"}, "bfloat16"),
        ("dp2", {"precision": "bf16", "reduce_dtype": "fp32"}, "float32"),
    ],
    ids=str,
)
def test_low_precision_plan_matches_one_process_and_reduces_in_its_dtype(
    mesh: str, settings: dict[str, Any], reduced: str | None, ranks: Callable[[int], RankPool]
) -> None:
    results = ranks(parse(mesh).world_size).run(checked, mesh, settings)
    assert all(result.passed for result, _ in results), results[0][0].worst
    assert reduced is None or all(seen == {reduced} for _, seen in results)
    if not settings:
        gradients = results[0][0].quantities["gradient"]
        assert max(c.error for c in gradients if c.metric != "scale") > 1e-5, "this was not computed in float16"
