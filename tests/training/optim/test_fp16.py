"""fp16 training: the loss scale, skipped steps after an overflow, and agreement with fp32."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import trained
from helpers.ranks import Ranks
from helpers.run_folder import rows_of
from helpers.watched import watched
from vitpar import parse
from vitpar.errors import RecipeError
from vitpar.parallel.precision import PRECISIONS
from vitpar.recipe import Recipe, read_recipe
from vitpar.recipe.sections.training import LossScaleSection
from vitpar.training.optim.loss_scale import LossScaler
from vitpar.training.optim.norms import clip_, global_norm

FP16_LOSS = 2e-3
"""Relative tolerance of losses after a few fp16 steps. fp16 has 11 significant bits (5e-4); seen: 4e-4 to 1.1e-3."""


def recipe_of(data: Path, mesh: str, **settings: Any) -> Recipe:
    values = {"train.batch_size": 8, "train.eval_every": 6, "train.precision": "fp16", "model.init": "timm"}
    return trained.recipe_of(data, mesh, **{**values, "checkpoint.every": None, **settings})


@pytest.mark.parametrize(
    ("mesh", "rank", "value"), [("dp2", 1, math.inf), ("pp2", 0, math.nan), ("tp2xfsdp2", 3, -math.inf)]
)
def test_overflow_on_one_rank_skips_the_step_on_all_ranks(
    mesh: str, rank: int, value: float, data: Path, tmp_path: Path, ranks: Ranks
) -> None:
    """A skipped step changes no parameter, average or optimizer state on any rank.

    The learning rate schedule counts it.
    """
    recipe = recipe_of(
        data, mesh, **{"loss_scale.initial_scale": 1024.0, "loss_scale.growth_interval": 2, "lr_schedule.warmup": 4}
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


def test_fp16_losses_and_norms_match_fp32(data: Path, tmp_path: Path, ranks: Ranks) -> None:
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
    ranks: Ranks,
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


def scaler(**settings: Any) -> LossScaler:
    """Return a scaler that starts at 64. Every setting has a different small value, so that a mix-up shows."""
    base = {"initial_scale": 64.0, "growth_interval": 3, "hysteresis": 2}
    return LossScaler(LossScaleSection(**{**base, **settings}))


def scales(subject: LossScaler, steps: str) -> list[float]:
    """Return the scale after each of `steps`: "." is a finite step, "x" an overflow."""
    found = []
    for step in steps:
        subject.update(step == "x")
        found.append(subject.scale)
    return found


@pytest.mark.parametrize(
    ("settings", "steps", "expected"),
    [
        ({}, "......", [64, 64, 128, 128, 128, 256]),
        ({"growth_interval": 2}, "....", [64, 128, 128, 256]),
        ({"growth_factor": 8.0}, "...", [64, 64, 512]),
        ({"max_scale": 200.0}, ".........", [64, 64, 128, 128, 128, 200, 200, 200, 200]),
        ({}, "xxx", [64, 32, 16]),  # once the hysteresis is used up, every overflow lowers the scale
        ({"hysteresis": 1}, "xx", [32, 16]),
        ({"hysteresis": 3}, "xxxx", [64, 64, 32, 16]),
        ({"backoff_factor": 0.25}, "xxx", [64, 16, 4]),
        ({"min_scale": 24.0}, "xxxx", [64, 32, 24, 24]),
        ({}, "x.x", [64, 64, 32]),  # fewer finite steps than growth_interval do not refill the hysteresis
        ({}, "x...xx", [64, 64, 64, 128, 128, 64]),  # growth refills it
        ({}, "..x...", [64, 64, 64, 64, 64, 128]),  # an overflow restarts the growth interval
        ({"dynamic": False}, "...xxxx...", [64] * 10),
    ],
)
def test_scale_grows_and_backs_off_as_configured(settings: dict[str, Any], steps: str, expected: list[float]) -> None:
    """Each row gives settings that differ from the default, a sequence of steps, and the scale after each of them."""
    subject = scaler(**settings)
    assert subject.scale == 64
    assert scales(subject, steps) == expected


@pytest.mark.parametrize(
    ("settings", "steps", "expected"),
    [
        ({"min_scale": 16.0}, "xxxxx", [False, False, False, True, True]),
        ({"min_scale": 64.0}, "xx.x", [False, True, False, True]),
        # The scale grew to 128, so it can fall.
        ({"min_scale": 64.0}, "x...xx", [False, False, False, False, False, False]),
        ({"dynamic": False}, "x..xx...x", [False, False, False, True, True, False, False, False, False]),
    ],
)
def test_exhausted_is_set_when_the_scale_cannot_fall(
    settings: dict[str, Any], steps: str, expected: list[bool]
) -> None:
    """An exhausted scale ends the run: more skipped steps would not help."""
    subject, found = scaler(**settings), []
    for step in steps:
        subject.update(step == "x")
        found.append(subject.exhausted)
    assert found == expected
    limit = "min_scale" if settings.get("dynamic", True) else "initial_scale"
    assert subject.floor == f"loss_scale.{limit} {settings.get(limit, 64.0):g}"


def test_restored_scaler_continues_the_same_scales() -> None:
    """Growth interval and hysteresis are part of the state, so a resumed run has the scales of an unstopped one."""
    steps = "..x...x.xx....."
    whole = scales(scaler(), steps)
    for cut in range(len(steps)):
        first, second = scaler(), scaler()
        before = scales(first, steps[:cut])
        second.load_state(json.loads(json.dumps(first.state())))
        assert before + scales(second, steps[cut:]) == whole
    # The state is clamped to new settings.
    state = {"scale": 64.0, "good_steps": 2, "hysteresis_left": 2}
    for settings, steps, expected in (
        ({"dynamic": False, "initial_scale": 8.0}, "....", [8] * 4),
        ({"hysteresis": 1, "growth_interval": 2, "max_scale": 100.0}, ".x", [100, 50]),
    ):
        other = scaler(**settings)  # type: ignore[arg-type]
        other.load_state(state)
        assert scales(other, steps) == expected


# finite gradients and clipping


def judged(gradients: dict[str, Tensor], loss: float = 1.0, name: str = "fp16") -> float:
    """Return the global norm of `gradients`, which is finite only if every gradient and the loss are."""
    model: Any = SimpleNamespace(
        config=SimpleNamespace(shared={}),
        device=torch.device("cpu"),
        precision=PRECISIONS[name],
        replicas=lambda tensor: 1,
    )
    return global_norm(gradients, model, torch.tensor(loss)).item()


@pytest.mark.usefixtures("alone")
def test_norm_is_finite_only_if_loss_and_gradients_are() -> None:
    """A step is skipped by this norm alone.

    Squares of large scaled gradients must not overflow, or good steps are skipped.
    """
    huge = {"a": torch.tensor([3e30, 0.0]), "b": torch.tensor([[4e30]])}
    assert judged(huge) == pytest.approx(5e30)  # the squares overflow float32
    assert judged(huge, name="fp32") == math.inf
    for bad in (math.inf, -math.inf, math.nan):
        assert not math.isfinite(judged({**huge, "c": torch.tensor([0.0, bad])}))
        assert not math.isfinite(judged(huge, loss=bad))
    assert judged({}, loss=3.0) == 0.0


def test_gradients_are_unscaled_and_clipped_at_once() -> None:
    def clipped(limit: float, scale: float) -> list[float]:
        gradients = {"a": torch.tensor([6.0]) * scale, "b": torch.tensor([8.0]) * scale}
        clip_(gradients, torch.tensor(10.0, dtype=torch.float64), limit, scale)
        return [value.item() for value in gradients.values()]

    assert clipped(0.0, 1024.0) == [6.0, 8.0]
    assert clipped(20.0, 1024.0) == [6.0, 8.0]
    assert clipped(5.0, 1024.0) == pytest.approx([3.0, 4.0], rel=1e-5)
    assert clipped(5.0, 1.0) == pytest.approx([3.0, 4.0], rel=1e-5)


# recipes


BASE = {"data.path": "x", "train.steps": 1}
REFUSED = [
    (["train.precision=bf16", "train.reduce_dtype=fp16"], "'bf16' does not support: use 'fp32' or 'bf16'"),
    (["loss_scale.initial_scale=0.5"], "loss_scale.initial_scale 0.5 is not within min_scale 1.0 and max_scale"),
    (["loss_scale.max_scale=4096"], "loss_scale.initial_scale 65536.0 is not within"),
]


def test_invalid_loss_scale_settings_are_refused() -> None:
    for assignments, message in REFUSED:
        with pytest.raises(RecipeError, match=message) as caught:
            read_recipe(None, {**BASE, "train.precision": "fp16"}, assignments)
        assert "\n" not in str(caught.value)


def test_settings_are_read_back_and_dropped_with_their_precision(tmp_path: Path) -> None:
    """The fp16 settings of a file must not block `--precision fp32`. Contradictory options are still refused."""
    file = tmp_path / "recipe.toml"
    settings = {"train.precision": "fp16", "train.reduce_dtype": "fp16", "loss_scale.hysteresis": 5}
    for more in ({}, {"train.precision": "bf16", "train.reduce_dtype": "bf16"}, settings):
        file.write_text((recipe := read_recipe(None, {**BASE, **more})).to_toml())
        assert read_recipe(file) == recipe
        assert ("loss_scale" in file.read_text()) == (recipe.train.precision == "fp16")
    plain = read_recipe(file, {"train.precision": "fp32"})
    assert plain.train.reduce_dtype is None and plain.loss_scale == LossScaleSection()
    same = read_recipe(file, {"train.precision": "fp16"}, ["loss_scale.growth_interval=7"])
    assert (same.train.reduce_dtype, same.loss_scale.hysteresis, same.loss_scale.growth_interval) == ("fp16", 5, 7)
    with pytest.raises(RecipeError, match=r"train\.reduce_dtype is 'fp16', which train.precision 'fp32' does not"):
        read_recipe(file, {"train.reduce_dtype": "fp16", "train.precision": "fp32"})
