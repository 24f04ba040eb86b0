"""Failures and cost of a training: the interval between checkpoints, the expected time, and what commands print."""

import json
import math
import random

import pytest

from helpers.command_line import Command
from vitpar.planner.goodput import Conditions, duration, goodput, interval

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
    assert alone.job_mtbf_hours == pytest.approx(50_700 / 8) and alone.useful > 0.999
    assert all_of_them.job_mtbf_hours == pytest.approx(3.094, rel=1e-3)
    assert all_of_them.interval_steps == round(interval(1.0, 50_700 * HOUR / 16_384) / 2.0) == 74
    assert all_of_them.cost == pytest.approx(2 * 16_384 * all_of_them.seconds / HOUR)
    assert all_of_them.useful == pytest.approx(200_000 / all_of_them.seconds) and 0.97 < all_of_them.useful < 0.98
    hopeless = goodput(10, 3600.0, 65_536, Conditions(1.0, 1.0))
    assert (hopeless.seconds, hopeless.useful) == (math.inf, 0.0) and hopeless.to_json()["seconds"] is None
    priced = goodput(10, 3.0, 6, Conditions(None, 10.0))
    assert (priced.cost, priced.interval_steps, priced.useful) == (pytest.approx(0.5), None, 1.0)


PLAN = "plan fsdp8 --model vit_small_patch16_224 --batch-size 256 --cluster 8xH100 --set train.steps=100000"
SCALING = "scaling --model vit_small_patch16_224 --batch-size 256 --cluster 2xH100 --set train.steps=1000"


def test_commands_tell_failures_and_cost(vitpar: Command) -> None:
    done = vitpar(*PLAN.split(), "--mtbf", "100", "--price", "2.5", "--stall", "3", "--restart", "300")
    (failures,) = (line for line in done.stdout.splitlines() if line.startswith("failures"))
    assert failures.startswith("failures   one in 12.5 hours on 8 devices; with a checkpoint every "), done.stderr
    assert "of the time is useful" in failures and "\ncost       " in done.stdout
    found = json.loads(vitpar(*PLAN.split(), "--price", "2.5", "--json").stdout)["predicted"]["training"]
    assert found["goodput"]["cost"] == pytest.approx(2.5 * found["device_hours"])
    done = vitpar(*SCALING.split(), "--price", "2", "--mtbf", "1000")
    assert "useful" in done.stdout and "cost" in done.stdout, done.stderr
    table = vitpar(*PLAN.replace("plan fsdp8", "search").split(), "--cluster", "8xH100,4xH100", "--price", "2")
    assert "days in all" in table.stdout and "cost" in table.stdout, table.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (f"{PLAN} --stall 3", "--stall is given without failures: add --mtbf HOURS"),
        (SCALING, "train.steps changes nothing in a prediction of scaling"),
        ("plan fsdp8 --price 2", "--price is given without a machine: add --cluster"),
    ],
)
def test_options_without_effect_are_refused(words: str, sentence: str, vitpar: Command) -> None:
    done = vitpar(*words.split())
    assert done.returncode == 2 and sentence in done.stderr
