"""Duration, failures and cost of a training: steps, images, intervals of checkpoints, and what commands print."""

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.command_line import Refused, printed
from vitpar.planner import training_time as times
from vitpar.planner.goodput import Conditions, duration, goodput, interval
from vitpar.recipe import Recipe, read_recipe
from vitpar.strategy import parse
from vitpar_cli.plan import plan
from vitpar_cli.scaling import scaling
from vitpar_cli.search import search

HOUR = 3600.0


@pytest.mark.parametrize("between", [600.0, HOUR, 30 * HOUR])
@pytest.mark.parametrize("stall", [0.3, 5.0, 60.0])
def test_interval_is_the_best_of_all(stall: float, between: float) -> None:
    conditions = Conditions(1.0, None, stall, 90.0)
    tried = [between * 1.01**power for power in range(-1500, 200)]
    least = min(duration(1e6, every, between, conditions) for every in tried)
    assert duration(1e6, interval(stall, between), between, conditions) <= 1.001 * least
    assert interval(stall, between) == pytest.approx(math.sqrt(2 * stall * between), rel=0.25)  # Young's


def simulated(work: float, every: float, between: float, conditions: Conditions, seed: int) -> float:
    """Return the seconds of one training whose failures are drawn: restarts fail too, and lose what was not saved."""
    draw = random.Random(seed)
    now, done, fails = 0.0, 0.0, draw.expovariate(1 / between)
    ready = 0.0  # when the steps begin again after a restart
    while done < work:
        end = max(now, ready) + min(every, work - done) + conditions.stall
        if end <= fails:
            now, done = end, done + min(every, work - done)
            continue
        now, ready = fails, fails + conditions.restart
        fails = now + draw.expovariate(1 / between)
    return now


@pytest.mark.parametrize(("every", "restart"), [(300.0, 60.0), (1800.0, 600.0)])
def test_expected_time_is_that_of_simulated_failures(every: float, restart: float) -> None:
    conditions, between, work = Conditions(1.0, None, 10.0, restart), 2 * HOUR, 48 * HOUR
    times = [simulated(work, every, between, conditions, seed) for seed in range(300)]
    assert duration(work, every, between, conditions) == pytest.approx(sum(times) / len(times), rel=0.015)


def test_more_devices_fail_more_often() -> None:
    alone, all_of_them = (goodput(100_000, 2.0, devices, Conditions(50_700.0, 2.0)) for devices in (8, 16_384))
    assert alone["job_mtbf_hours"] == pytest.approx(50_700 / 8) and alone["useful"] > 0.999
    assert all_of_them["job_mtbf_hours"] == pytest.approx(3.094, rel=1e-3)
    assert all_of_them["interval_steps"] == round(interval(1.0, 50_700 * HOUR / 16_384) / 2.0) == 74
    assert all_of_them["cost"] == pytest.approx(2 * 16_384 * all_of_them["seconds"] / HOUR)
    assert (
        all_of_them["useful"] == pytest.approx(200_000 / all_of_them["seconds"]) and 0.97 < all_of_them["useful"] < 0.98
    )
    hopeless = goodput(10, 3600.0, 65_536, Conditions(1.0, 1.0))
    assert (hopeless["seconds"], hopeless["device_hours"], hopeless["useful"]) == (None, None, 0.0)
    priced = goodput(10, 3.0, 6, Conditions(None, 10.0))
    assert (priced["cost"], priced["interval_steps"], priced["useful"]) == (pytest.approx(0.5), None, 1.0)


PLAN = "plan fsdp8 --model vit_small_patch16_224 --batch-size 256 --cluster 8xH100 --set train.steps=100000"
SCALING = "scaling --model vit_small_patch16_224 --batch-size 256 --cluster 2xH100 --set train.steps=1000"


def test_commands_tell_failures_and_cost() -> None:
    words = PLAN.split()[1:]
    shown = printed(plan, *words, "--mtbf", "100", "--price", "2.5", "--stall", "3", "--restart", "300")
    (failures,) = (line for line in shown.splitlines() if line.startswith("failures"))
    assert failures.startswith("failures   one in 12.5 hours on 8 devices; with a checkpoint every ")
    assert "of the time is useful" in failures and "\ncost       " in shown
    found = json.loads(printed(plan, *words, "--price", "2.5", "--json"))["predicted"]["training"]
    assert found["goodput"]["cost"] == pytest.approx(2.5 * found["device_hours"])
    shown = printed(scaling, *SCALING.split()[1:], "--price", "2", "--mtbf", "1000")
    assert "useful" in shown and "cost" in shown
    table = printed(search, *words[1:], "--cluster", "2xH100,1xH100", "--price", "2")
    assert "days in all" in table and "cost" in table


def test_options_without_effect_are_refused(tmp_path: Path, refused: Refused) -> None:
    rows = [
        (f"{PLAN} --stall 3".split(), "--stall is given without failures: add --mtbf HOURS"),
        (SCALING.split(), "train.steps changes nothing in a prediction of scaling"),
        (["plan", "fsdp8", "--price", "2"], "--price is given without a machine: add --cluster"),
    ]
    refused(tmp_path, rows)


def recipe(**settings: Any) -> Recipe:
    named = {name.replace("__", "."): value for name, value in settings.items()}
    return read_recipe(None, {"data.path": "not/here", **named}, needs_length=False)


def priced(batch_size: int, seconds: float) -> Any:
    return SimpleNamespace(plan=parse("dp8"), batch_size=batch_size, seconds=seconds)


def test_days_and_device_hours_are_those_of_all_steps() -> None:
    length = times.training_length(recipe(train__epochs=90))
    found = times.training_time(priced(1000, 0.5), length)
    assert found["steps"] == math.ceil(90 * 1_281_167 / 1000) == 115_306
    assert found["images"] == 115_306_000
    assert found["seconds"] / 86_400 == pytest.approx(115_306 * 0.5 / 86_400)
    assert found["device_hours"] == pytest.approx(115_306 * 0.5 * 8 / 3600)
    assert "ImageNet-1k's 1,281,167 images are assumed" in found["assumed"]
    words = times.training_rows(found, "GPU-hours")[0][1]
    assert words.startswith("16.0 hours, 128 GPU-hours: 115,306 steps, 90 epochs of 1,281,167 samples")
    assert words.endswith("; input, evaluation and checkpoints not included")
    # Twice the batch: half the steps, as many images.
    assert times.training_time(priced(2000, 0.5), length)["steps"] == 57_653


@pytest.mark.parametrize(("rate", "devices", "step"), [(1000, 8, 1.0), (1000, 4, 0.5), (1000, 3, 0.5), (9e9, 8, 0.5)])
def test_steps_wait_for_the_input_of_their_machines(rate: float, devices: int, step: float) -> None:
    length = times.training_length(recipe(train__steps=500), hosts=(rate, devices))
    found = times.training_time(priced(1000, 0.5), length)
    assert found["seconds"] == 500 * step and found["waiting"] == pytest.approx(1 - 0.5 / step)
    assert times.training_rows(found, "GPU-hours")[0][1].endswith("; evaluation and checkpoints not included")
    assert times.condition_words(found) == {"waiting": "50%" if step > 0.5 else "0%"}


def test_length_is_that_of_the_recipe_or_of_the_default_epochs() -> None:
    found = times.training_time(priced(1024, 2.0), times.training_length(recipe(train__steps=500)))
    assert (found["steps"], found["images"], found["seconds"], found["assumed"]) == (500, 512_000, 1000.0, "")
    words = times.training_rows(found, "GPU-hours")[0][1]
    assert words.startswith("16.7 minutes, 2.22 GPU-hours: 500 steps, 512,000 samples")
    length = times.training_length(recipe())
    assert (length.recipe.train.epochs, length.samples) == (300, 1_281_167)
    assert length.assumed == (
        "300 epochs of ImageNet-1k's 1,281,167 images are assumed: give others with --epochs and --data"
    )
    of_text = times.training_length(recipe(task__name="mlm", model__name="bert_base"))
    assert "40 epochs of BERT's 6,400,000 sequences are assumed" in of_text.assumed
    assert times.training_length(recipe(task__name="mae", model__name="mae_vit_base")).recipe.train.epochs == 800

    stream = {"train": "s3/{0..9}.tar", "val": "v.tar", "samples": 50_000, "val_samples": 9, "classes": 10}
    streamed = read_recipe(None, {**{f"stream.{key}": value for key, value in stream.items()}, "train.epochs": 2})
    length = times.training_length(streamed)
    assert (length.samples, length.steps(1000), length.assumed) == (50_000, 100, "")
