"""Dynamic loss scale of fp16: its growth and backoff, unscaling and clipping, its settings, and its display."""

import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vitpar.errors import RecipeError
from vitpar.parallel.precision import PRECISIONS
from vitpar.training.optim.loss_scale import LossScaler, LossScaleSection
from vitpar.training.optim.norms import clip_, global_norm
from vitpar.training.recipe import read_recipe

# the scale over the steps


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
    (["train.reduce_dtype=bf16"], "train.reduce_dtype is 'bf16', which does nothing with train.precision 'fp32'"),
    (["train.precision=bf16", "train.reduce_dtype=fp16"], "'bf16' does not support: use 'fp32' or 'bf16'"),
    (["train.precision=fp16", "train.reduce_dtype=bf16"], "'fp16' does not support: use 'fp32' or 'fp16'"),
    (["train.precision=fp8", "train.reduce_dtype=fp16"], "'fp8' does not support: use 'fp32' or 'bf16'"),
    (["loss_scale.initial_scale=2"], "loss_scale.initial_scale is 2.0, which does nothing with train.precision 'fp32'"),
    (["loss_scale.initial_scale=0.5"], "loss_scale.initial_scale 0.5 is not within min_scale 1.0 and max_scale"),
    (
        ["loss_scale.initial_scale=1e30"],
        r"'loss_scale.initial_scale' is 1e\+30: input should be less than or equal",
    ),
    (["loss_scale.max_scale=4096"], "loss_scale.initial_scale 65536.0 is not within"),
    (["loss_scale.min_scale=0"], "recipe key 'loss_scale.min_scale' is 0: input should be greater than 0"),
    (["loss_scale.growth_factor=1"], "'loss_scale.growth_factor' is 1: input should be greater than 1"),
    (["loss_scale.backoff_factor=1"], "'loss_scale.backoff_factor' is 1: input should be less than 1"),
    (["loss_scale.hysteresis=0"], "'loss_scale.hysteresis' is 0: input should be greater than or equal to 1"),
    (["loss_scale.initial_scale=inf"], "'loss_scale.initial_scale' is inf: input should be a finite number"),
    (
        ["loss_scale.dynamic=false", "loss_scale.growth_factor=4"],
        "growth_factor is 4.0, which a constant scale does not",
    ),
]


def test_invalid_loss_scale_settings_are_refused() -> None:
    for assignments, message in REFUSED:
        base = {**BASE, "train.precision": "fp32" if "does nothing" in message else "fp16"}
        with pytest.raises(RecipeError, match=message) as caught:
            read_recipe(None, base, assignments)
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
    with pytest.raises(RecipeError, match=r"train\.reduce_dtype is 'fp16', which does nothing"):
        read_recipe(file, {"train.reduce_dtype": "fp16", "train.precision": "fp32"})


# display


def test_progress_and_log_show_the_scale() -> None:
    from rich.console import Console

    from vitpar.tasks import LabelSet
    from vitpar.tasks.classify import Classify
    from vitpar.training.events import Logged, Reporter
    from vitpar_cli.progress import ConsoleReporter

    speed = {"images_per_second": 100.0, "step_ms": 10.0, "data_ms": 0.1, "lr": 0.1, "epoch": 0.5}
    skipped = {"step": 3, "loss": None, "grad_norm": None, "loss_scale": 1024.0, "skipped": True, **speed}
    lines: list[str] = []
    folder: Any = SimpleNamespace(log=lines.append)
    file = io.StringIO()
    console = ConsoleReporter(Console(file=file, force_terminal=False, width=200), lambda: 0.0)
    task = Classify(LabelSet(7))
    console._header, console._first, console._begun = SimpleNamespace(steps=10, task=task), None, 0.0  # type: ignore[assignment]
    for shown in (skipped, {**skipped, "skipped": False, "loss": 2.25, "grad_norm": 0.5}):
        Logged(folder, Reporter(), task).stepped(shown)
        console._printed = float("-inf")
        console.reached(shown["step"])
        console.stepped(shown)
    assert lines[0].startswith("step 3  loss nan  lr 0.1  grad norm nan  scale 1,024  100.0 images/s")
    assert lines[1].startswith("step 3  loss 2.2500  lr 0.1  grad norm 0.5  scale 1,024  100.0 images/s")
    first, second = file.getvalue().splitlines()
    assert first.startswith("step 3/10  epoch 0.50  loss ?  scale 1,024 skipped  lr 0.1  100 images/s")
    assert second.startswith("step 3/10  epoch 0.50  loss 2.2500  scale 1,024  lr 0.1  100 images/s")
