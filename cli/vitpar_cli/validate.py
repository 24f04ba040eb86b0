"""`vitpar validate`: compare predictions with measurements."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from vitpar.errors import PlannerError
from vitpar.launch import World
from vitpar.launch.resources import choose_device
from vitpar.launch.world import Device
from vitpar.models import ModelConfig
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import Price, price
from vitpar.planner.report.data import duration, origin_to_json, plan_of, title_of
from vitpar.planner.report.uncertainty import uncertainty
from vitpar.recipe import Recipe
from vitpar.recipe.machine import resolve
from vitpar.recipe.request import RecipeRequest
from vitpar.strategy import Plan, parse
from vitpar.strategy import validate as validated
from vitpar.strategy.plan_json import read_plan
from vitpar.strategy.support import refuse_clashes
from vitpar.terminal import complain
from vitpar.text import count, shown, size
from vitpar.training.optim.state_memory import moments
from vitpar_cli import recipe_options as o
from vitpar_cli.outputs import Status, make_folder, origin, print_json, print_rows, refuse_unwritable, write
from vitpar_cli.profiled import MachineOptions, machine_options, planned_recipe
from vitpar_cli.search_view import model_words, print_origin, print_plans
from vitpar_cli.world import run_in_world


@o.shared(asked=o.recipe(*o.SUBJECT, "batch_size"), machine=machine_options("hardware", "model_profile"))
def validate(
    asked: RecipeRequest,
    machine: MachineOptions,
    plans: list[str] | None = typer.Argument(
        None, metavar="PLAN…", help="Strategies or plan.json files.  \\[default: examples of every kind]"
    ),
    microbatches: int | None = typer.Option(
        None,
        "--microbatches",
        min=1,
        help="Micro-batches per step of strategies.",
        rich_help_panel=o.PANELS["parallel"],
    ),
    seconds: float = typer.Option(2.0, "--seconds", min=0.01, help="Approximate seconds per run of a plan."),
    device: o.DeviceName = None,
    out: Path | None = typer.Option(None, "--out", metavar="FILE", help="Write all rows as JSON, after each run."),
    correct: Path | None = typer.Option(
        None, "--correct", metavar="FOLDER", help="Write both profiles to FOLDER, corrected by the measurements."
    ),
    as_json: o.AsJson = False,
) -> None:
    """Run plans for a few steps and compare predictions with measurements.

    The plans need as many ranks as the hardware was profiled with. Each plan runs in separate processes on random
    images. All plans run twice, and those whose two runs disagree run a third time. At the end the plan predicted to be
    the fastest alternates with the fastest of the others. Other programs should not use the machine meanwhile: the
    difference between the runs of a plan shows how reliable the figures are.

    Example: vitpar validate dp4 fsdp4 pp2xdp2 plan.json
    """
    from vitpar.planner.measure.steps import example_plans

    files = any(text.endswith(".json") for text in plans or ())
    if microbatches is not None and (files or not plans):
        raise PlannerError("--microbatches is given, but these plans have their own: give it only with strategies")
    corrected = None if correct is None else _corrected_files(correct, machine.hardware, machine.model_profile)
    refuse_unwritable(out)
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # else forked processes could not use GPUs
    merged = planned_recipe(asked, doing="a validation")
    device_type, costs = choose_device(device), machine.costs(merged)
    images, ranks, profile = merged.train.batch_size, costs.hardware.ranks, costs.model
    if plans:
        chosen = [_plan(text, costs.whole, images, ranks, microbatches) for text in plans]
        for plan in chosen:
            refuse_clashes(plan, profile.precision, profile.compiled)
    else:
        chosen = list(example_plans(costs.whole, ranks, images, profile.precision, profile.compiled))
    if not chosen:
        raise PlannerError(
            f"no example plan fits a batch of {images} on {count(ranks, 'rank')}: give plans, or another --batch-size"
        )
    prices = [price(plan, costs, images, moments(merged, costs.whole)) for plan in chosen]
    resolve(chosen[0], device_type)  # refuses more ranks than the launcher or the GPUs provide
    run_in_world(
        *(ranks, None, _validate),
        *(device_type, seconds, merged, costs, prices, out, corrected, as_json),
    )


def _validate(
    world: World,
    device_type: Device,
    seconds: float,
    recipe: Recipe,
    costs: LayerCosts,
    prices: list[Price],
    out: Path | None,
    corrected: tuple[Path, Path] | None,
    as_json: bool,
) -> int:
    """Run plans with a rank of `world` and compare them with their prices, and return the exit code.

    corrected: files for the corrected profiles; None for none.
    """
    from vitpar.planner.measure.steps import PlanRunner, Training
    from vitpar.planner.report.accuracy import accuracy, correction, measured_row

    profile, plans = costs.model, [one.plan for one in prices]
    runner = PlanRunner(world, device_type, seconds)
    profiled = {"precision": profile.precision, "compile": profile.compiled}
    training = Training(recipe.updated(train=profiled), costs.whole)
    rows = list[dict[str, Any]]()
    favourite = min(range(len(prices)), key=lambda index: prices[index].seconds)
    about = {**origin_to_json(origin(), costs), "batch_size": prices[0].batch_size}
    about["uncertainty"] = uncertainty(prices[favourite], costs)

    def found() -> dict[str, Any]:
        return about | accuracy(rows) | {"rows": rows}

    with Status(shown=world.rank == 0) as status:
        for run, (index, measured) in enumerate(runner.measure(training, plans, favourite), start=1):
            # Appends in the first run of a plan, replaces in later ones.
            rows[index : index + 1] = [measured_row(prices[index], measured, prices[index].mfu(costs))]
            if world.rank == 0 and out is not None:
                write(out, json.dumps(found(), indent=1) + "\n")
            status.tell(f"run {run}, of {max(run, 2 * len(plans))} or more: {plans[index]}")
    if world.rank == 0:
        if corrected is not None:
            factors = correction(rows)
            for better, file in zip(factors.of(costs.hardware, profile), corrected, strict=True):
                better.save(file)
            complain(f"corrected profiles written to {corrected[0].parent}: {factors}")
        print_json(found()) if as_json else _show(found())
    return 0


def _corrected_files(folder: Path, hardware: Path | None, model: Path | None) -> tuple[Path, Path]:
    """Make the folder for corrected profiles if needed and return their paths.

    Raises PlannerError if the folder cannot be made, or if the original profiles would be overwritten.
    """
    files = folder / "hardware.json", folder / "model.json"
    for path, source in zip(files, (hardware, model), strict=True):
        if path.resolve() == (source or Path(path.name)).resolve():
            raise PlannerError(f"--correct {folder} would overwrite the profile {path}: use another folder")
    make_folder(folder, "give --correct a writable folder")
    return files


def _plan(text: str, config: ModelConfig, batch_size: int, ranks: int, microbatches: int | None) -> Plan:
    plan = read_plan(text) if text.endswith(".json") else replace(parse(text), microbatches=microbatches)
    plan = plan.resolve(ranks) if plan.is_open else plan
    if plan.world_size != ranks:
        raise PlannerError(
            f"'{shown(plan)}' takes {count(plan.world_size, 'rank')} but the hardware was profiled with {ranks}: "
            f"profile it with --ranks {plan.world_size}, or give plans of {count(ranks, 'rank')}"
        )
    return validated(plan, config, batch_size)


def _show(found: dict[str, Any]) -> None:
    """Print a validation."""
    from vitpar.planner.report.accuracy import fullest, memory_error, time_error

    def off(name: str) -> str:
        return "{mean:.1%} off on average, {largest:.1%} at most".format_map(found[name])

    console, rows = Console(highlight=False), sorted(found["rows"], key=lambda row: row["measured_seconds"])
    best = min(found["rows"], key=lambda row: row["predicted_seconds"])
    words = model_words(found, count(plan_of(best).world_size, "rank"))
    console.print(f"[bold]{words}, batch {best['batch_size']:,}[/bold]", soft_wrap=True)
    print_origin(console, found)
    lines = []
    for row in rows:
        most, error = fullest(row), memory_error(row)
        memory = ("", "") if most is None or error is None else (size(most), f"{error:+.1%}")
        time = duration(row["predicted_seconds"]), duration(row["measured_seconds"]), f"{time_error(row):+.1%}"
        lines.append((*time, size(row["predicted_memory_bytes"]), *memory, title_of(row)))
    headings = ("predicted", "measured", "error") * 2
    print_plans(console, "time of a step, and memory of the fullest rank", headings, lines)
    text = {"time": off("time_error")}
    text |= {"expected": found["uncertainty"]["source"]} if found["uncertainty"] else {}
    text |= {} if best["mfu"] is None else {"MFU": f"{best['mfu'] * 100:.1f} % predicted for the fastest"}
    text |= {"memory": off("memory_error")} if found["memory_error"] else {}
    text["order"] = (
        f"rank correlation {found['rank_correlation']:.3f}; the plan predicted to be fastest is "
        f"{found['chosen_slower_than_best']:.1%} slower than the fastest measured plan"
    )
    if repeat := found["repeat"]:
        text["repeat"] = (
            f"repeated measurements of a plan differ by {repeat['mean']:.1%} on average, {repeat['largest']:.1%} at "
            "most: predictions cannot be checked more closely"
        )
    console.print()
    print_rows(console, list(text.items()))
