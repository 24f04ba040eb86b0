"""Learning rates against timm's and torch's schedulers, step by step."""

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from helpers.oracles import timm
from vitpar.intervals import NOTHING, Interval
from vitpar.recipe import read_recipe
from vitpar.recipe.rates.schedules import LRSchedule, Schedules, parse_drop_path, parse_image_sizes
from vitpar.recipe.rates.shapes import RunLengths, parse_shape

PEAK, LEAST, FIRST = 3e-3, 1e-5, 1e-6
RUN = RunLengths(samples=1000, batch_size=90, steps=100)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)


def timms(kind: str, *, warmup: int = 0, per_epoch: bool = False, **arguments: Any) -> list[float]:
    """Return timm's rate of each update."""
    held, warm = optimizer(), {"warmup_t": warmup, "warmup_lr_init": FIRST, "t_in_epochs": per_epoch}
    scheduler = getattr(timm.scheduler, f"{kind}LRScheduler")(held, **warm, **arguments)
    rates = []
    for update in range(RUN.steps):
        if per_epoch:
            scheduler.step(update * RUN.batch_size // RUN.samples)
        else:
            scheduler.step_update(update)
        rates.append(held.param_groups[0]["lr"])
    return rates


def torchs(scheduler: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]) -> list[float]:
    """Return torch's rate of each update."""
    held, rates = optimizer(), []
    made = scheduler(held)
    for _ in range(RUN.steps):
        rates.append(held.param_groups[0]["lr"])
        held.step()
        made.step()
    return rates


def ours(shape: str, warmup: Interval = NOTHING, **more: Any) -> list[float]:
    schedule = LRSchedule(RUN, PEAK, parse_shape(shape), warmup, FIRST if warmup != NOTHING else None, **more)
    return [schedule(step) for step in range(1, RUN.steps + 1)]


WARM = {"lr_min": LEAST, "warmup": 10}
THRICE = {"t_initial": 30, "cycle_limit": 3, "cycle_decay": 0.5, "warmup_prefix": True}
RSQRT = {"t_initial": 90, "stable_fn": "rsqrt", "decay_fn": "linear", **WARM}
TEN = Interval(10.0)


@pytest.mark.parametrize(
    ("shape", "kind", "theirs"),
    [
        ("cosine", "Cosine", {"t_initial": 90, "warmup_prefix": True, **WARM}),
        ("cosine(cycles=3, decay=0.5)", "Cosine", {**THRICE, **WARM}),
        ("polynomial(power=0.5)", "Poly", {"t_initial": 90, "power": 0.5, "warmup_prefix": True, **WARM}),
        ("linear", "Poly", {"t_initial": 90, "power": 1.0, "warmup_prefix": True, **WARM}),
        ("wsd(decay=30)", "WSD", {"t_initial": 90, "decay_t": 30, **WARM}),
        ("wsd(decay=30 %, form=cosine)", "WSD", {"t_initial": 90, "decay_t": 30, "decay_fn": "cosine", **WARM}),
        ("wsd(form=linear)", "WSD", {"t_initial": 90, "decay_t": 20, "decay_fn": "linear", **WARM}),
        ("rsqrt(decay=0.2)", "WSD", {"decay_t": 20, **RSQRT}),
        ("rsqrt(timescale=40, decay=1)", "WSD", {"decay_t": 1, "stable_timescale": 40, **RSQRT}),
    ],
)  # fmt: skip
def test_shapes_after_a_warmup_equal_timm(shape: str, kind: str, theirs: dict[str, Any]) -> None:
    assert ours(shape, TEN, least=LEAST) == pytest.approx(timms(kind, **theirs), rel=1e-12)


def test_cosine_may_begin_with_the_run_or_change_between_epochs_only() -> None:
    """timm's defaults: the cosine counts the warm-up, and rates change once an epoch. 100 steps are 9 epochs."""
    theirs = timms("Cosine", t_initial=100, lr_min=LEAST, warmup=10)
    assert ours("cosine", TEN, least=LEAST, after_warmup=False) == pytest.approx(theirs, rel=1e-12)
    run = RunLengths(samples=1000, batch_size=100, steps=100)
    schedule = LRSchedule(run, PEAK, parse_shape("cosine"), Interval(2, "epochs"), FIRST, LEAST, False, per_epoch=True)
    held = optimizer()
    scheduler = timm.scheduler.CosineLRScheduler(held, 10, lr_min=LEAST, warmup_t=2, warmup_lr_init=FIRST)
    for step in range(1, 101):
        scheduler.step((step - 1) // 10)
        assert schedule(step) == pytest.approx(held.param_groups[0]["lr"], rel=1e-12), step


@pytest.mark.parametrize(
    ("shape", "scheduler"),
    [
        ("constant", lambda held: lr_scheduler.ConstantLR(held, 1.0)),
        ("linear", lambda held: lr_scheduler.LinearLR(held, 1.0, 0.0, 100)),
        ("polynomial(power=2)", lambda held: lr_scheduler.PolynomialLR(held, 100, 2.0)),
        ("cosine", lambda held: lr_scheduler.CosineAnnealingLR(held, 100)),
        ("cosine(cycles=4)", lambda held: lr_scheduler.CosineAnnealingWarmRestarts(held, 25)),
        ("step(every=30, gamma=0.2)", lambda held: lr_scheduler.StepLR(held, 30, 0.2)),
        ("multistep(at=[3 epochs, 80 %], gamma=0.5)", lambda held: lr_scheduler.MultiStepLR(held, [33, 80], 0.5)),
        ("rsqrt(timescale=16)", lambda held: lr_scheduler.LambdaLR(held, lambda t: math.sqrt(16 / (16 + t)))),
    ],
)
def test_shapes_without_a_warmup_equal_torch(
    shape: str, scheduler: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]
) -> None:
    assert ours(shape) == pytest.approx(torchs(scheduler), rel=1e-12)


def test_warmup_from_nothing_ends_at_the_largest_rate() -> None:
    schedule = LRSchedule(RunLengths(1000, 100, 14), 1.0, warmup=Interval(4.0), least=0.2)
    assert [schedule(step) for step in range(1, 6)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert schedule(15) == schedule(1000) == pytest.approx(0.2) and schedule.warning is None
    short = LRSchedule(RunLengths(1000, 100, 50), 1.0, warmup=Interval(80.0))
    assert [short(20), short(40)] == [0.25, 0.5]
    assert short.warning is not None and "the warm-up of 80 steps is as long as the run or longer" in short.warning
    assert LRSchedule(RunLengths(1000, 100, 49), 1.0, warmup=Interval(80.0)).warning is None, "a trial"
    falls = LRSchedule(RunLengths(1000, 100, 100), 1.0, parse_shape("step(every=3 epochs)"), Interval(0.1, "epochs"))
    assert [falls(step) for step in (1, 30, 31)] == pytest.approx([1.0, 1.0, 0.1]), "milestones count from the start"


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ("500 steps", 500),
        (0.07, 70),
        ("10 %", 100),
        ("1 epoch", 8),
        ("1e3 samples", 8),
        ("0.001 epochs", 1),
    ],
)
def test_intervals_in_steps(given: object, steps: int) -> None:
    interval = Interval.of(given)
    assert interval.steps(samples=1000, batch_size=128, total=1000) == steps
    assert Interval.of(str(interval)) == interval


@pytest.mark.parametrize(
    "given", [-1, True, 1.5, "1.5 steps", "nan epochs", "101 %", "5 parsecs", math.inf, 10**30, "1..2"]
)
def test_what_is_no_interval_is_refused(given: object) -> None:
    with pytest.raises(ValueError, match="is no interval: give steps"):
        Interval.of(given)


@pytest.mark.parametrize(
    ("parse", "text", "words"),
    [
        (parse_shape, "cosin", r"'cosin' is no shape (did you mean 'cosine'?): give constant, linear"),
        (parse_shape, "cosine(", "'cosine(' is no shape: give a name with arguments, as in step(every=30 epochs)"),
        (parse_shape, "cosine(cycle=2)", "cosine's cycle: extra inputs are not permitted (it takes cycles, decay"),
        (parse_shape, "wsd(decay=0.1, decay=0.2)", "'decay=0.1, decay=0.2' is not understood"),
        (parse_shape, "step(every=3 minutes)", "step's every: 3 minutes have no known number of steps: give steps"),
        (parse_shape, "multistep(at=[x])", "'x' is no interval"),
        (parse_drop_path, "earl(until=1)", "'earl' is no course of drop-path (did you mean 'early'?): give constant"),
        (
            parse_image_sizes,
            "128 to 40 %",
            "'128 to 40 %' is no size with an end: write 128 until 40 %, 192 until 80 %",
        ),
        (parse_image_sizes, "128 until 40 minutes", "40 minutes have no known number of steps"),
    ],
)
def test_what_is_no_schedule_is_refused(parse: Callable[[str], Any], text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        parse(text)


def schedules(samples: int, batch_size: int, **settings: Any) -> Schedules:
    """Return the schedules of a ViT that takes images of any size."""
    model = {"model.name": "vit_small_patch16_224", "model.position": "sincos2d"}
    recipe = read_recipe(None, {"data.path": "x", "train.batch_size": batch_size, **model, **settings})
    return Schedules.of(recipe, samples, recipe.config(10))


@pytest.mark.parametrize(("first", "last"), [(0.04, 0.4), (0.4, 0.0), (0.0, 0.1)])
@pytest.mark.parametrize(("epochs", "steps"), [(10, 100), (1, 3), (1, 1)])
def test_weight_decay_matches_dino(first: float, last: float, epochs: int, steps: int) -> None:
    """The formula is that of `cosine_scheduler` in DINO's utils.py without warm-up."""
    settings = {"optimizer.weight_decay": first, "optimizer.weight_decay_end": last, "train.steps": epochs * steps}
    schedule = schedules(steps, 1, **settings).named["weight_decay"]
    every = np.arange(epochs * steps)
    expected = last + 0.5 * (first - last) * (1 + np.cos(np.pi * every / len(every)))
    assert [schedule(step + 1) for step in every.tolist()] == pytest.approx(expected.tolist(), abs=1e-12)


def drop_scheduler(rate: float, epochs: int, updates: int, cutoff: int, mode: str, form: str) -> list[float]:
    """Return stochastic depth as the code of arXiv 2303.01500 does (facebookresearch/dropout, drop_scheduler.py)."""
    late, early = [0.0, rate][mode == "late"], [rate, 0.0][mode == "late"]
    first = np.full(cutoff * updates, early) if form == "constant" else np.linspace(early, 0, cutoff * updates)
    return [*first, *np.full((epochs - cutoff) * updates, late)]


@pytest.mark.parametrize(
    ("text", "mode", "form"),
    [
        ("early(until=4 epochs)", "early", "constant"),
        ("early(until=40 %, form=linear)", "early", "linear"),
        ("late(after=20)", "late", "constant"),
    ],
)
def test_drop_path_equals_that_of_its_source(text: str, mode: str, form: str) -> None:
    settings = {"train.drop_path_schedule": text, "model.drop_path": 0.5, "train.steps": 50}
    schedule = schedules(50, 10, **settings).named["drop_path"]
    assert [schedule(step) for step in range(1, 51)] == pytest.approx(drop_scheduler(0.5, 10, 5, 4, mode, form))


def test_image_sizes_are_parts_of_the_run() -> None:
    settings = {"train.image_sizes": "128 until 2 epochs, 192 until 80 %", "train.steps": RUN.steps}
    schedule = schedules(RUN.samples, RUN.batch_size, **settings).named["image_size"]
    found = itertools.groupby(map(schedule, range(1, 101)))
    assert [(size, len(list(steps))) for size, steps in found] == [(128, 22), (192, 58), (224, 20)]
