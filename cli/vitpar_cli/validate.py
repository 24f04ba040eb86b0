"""`vitpar validate`: compare predictions with measurements."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from vitpar.errors import PlannerError
from vitpar.io import read_json
from vitpar.launch.resources import choose_device
from vitpar.launch.world import Device
from vitpar.terminal import complain
from vitpar.text import count, shown, size
from vitpar.training.ranks import resolve
from vitpar_cli import recipe_options as o
from vitpar_cli.outputs import ProgressLines, origin, refuse_unwritable, write
from vitpar_cli.profiled import HardwareFile, ModelFile, costs_of, planned_recipe
from vitpar_cli.search_view import model_words, print_origin, print_plans
from vitpar_cli.world import run_ranks

if TYPE_CHECKING:
    from vitpar.launch import World
    from vitpar.models import ModelConfig
    from vitpar.planner.cost.layer import LayerCosts
    from vitpar.planner.cost.price import Price
    from vitpar.planner.report.accuracy import AccuracyRow
    from vitpar.strategy import Plan
    from vitpar.training.recipe import Recipe


def validate(
    plans: Annotated[
        list[str] | None,
        typer.Argument(metavar="PLAN…", help="Strategies or plan.json files.  \\[default: examples of every kind]"),
    ] = None,
    recipe: o.RecipeFile = None,
    model: o.ModelName = None,
    task: o.TaskName = None,
    data: o.DataDir = None,
    weights: o.WeightsDir = None,
    hardware: HardwareFile = None,
    model_profile: ModelFile = None,
    batch_size: o.BatchSize = None,
    microbatches: o.Microbatches = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0.01, help="Approximate seconds per run of a plan.")] = 2.0,
    device: o.DeviceName = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write all rows as JSON, after each run.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a stopped validation: keep the runs in the file of --out.")
    ] = False,
    correct: Annotated[
        Path | None,
        typer.Option(
            "--correct",
            metavar="FOLDER",
            help="Write both profiles to FOLDER, corrected by the measurements.",
        ),
    ] = None,
    as_json: o.AsJson = False,
    assignments: o.Assignments = None,
) -> None:
    """Run plans for a few steps and compare predictions with measurements.

    The plans need as many ranks as the hardware was profiled with. Each plan runs in separate processes on random
    images. All plans run twice, and those whose two runs disagree run a third time. At the end the plan predicted to be
    the fastest alternates with the fastest of the others. The output shows which share of the cores other programs
    used; above 10 %, the figures are not reliable.

    A validation that was stopped continues with --resume and the same plans and profiles.

    Example: vitpar validate dp4 fsdp4 pp2xdp2 plan.json
    """
    from vitpar.planner.cost.price import price
    from vitpar.planner.measure.steps import example_plans
    from vitpar.strategy.support import refuse_clashes
    from vitpar.training.optim.state_memory import moments

    files = any(text.endswith(".json") for text in plans or ())
    if microbatches is not None and (files or not plans):
        raise PlannerError("--microbatches is given, but these plans have their own: give it only with strategies")
    if resume and out is None:
        raise PlannerError("--resume requires --out: name the file with the rows of the stopped validation")
    corrected = None if correct is None else _corrected_files(correct, hardware, model_profile)
    refuse_unwritable(out, *(corrected or ()))
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # else forked processes could not use GPUs
    # --microbatches applies to the plans on the command line, not to the recipe's plan.
    asked = o.request(validate, locals()) | {"parallel.microbatches": None}
    merged = planned_recipe(asked, doing="a validation")
    device_type, costs = choose_device(device), costs_of(merged, None, hardware, model_profile, None)
    images = merged.train.batch_size
    machine, profile = costs.hardware, costs.model
    if plans:
        chosen = [_plan(text, costs.whole, images, machine.ranks, microbatches) for text in plans]
        for plan in chosen:
            refuse_clashes(plan, profile.precision, profile.compiled)
    else:
        chosen = list(example_plans(costs.whole, machine.ranks, images, profile.precision, profile.compiled))
    if not chosen:
        raise PlannerError(
            f"no example plan fits a batch of {images} on {count(machine.ranks, 'rank')}: give plans, or another "
            "--batch-size"
        )
    prices = [price(plan, costs, images, moments(merged, costs.whole)) for plan in chosen]
    earlier = _rows_of(out, costs) if resume and out is not None else []
    resolve(chosen[0], device_type)  # refuses more ranks than the launcher or the GPUs provide
    run_ranks(
        *(machine.ranks, _validate),
        *(device_type, seconds, merged, costs, chosen, prices, earlier if resume else None, out, corrected, as_json),
    )


def _validate(
    world: "World",
    device_type: Device,
    seconds: float,
    recipe: "Recipe",
    costs: "LayerCosts",
    plans: "list[Plan]",
    prices: "list[Price]",
    earlier: list[dict] | None,
    out: Path | None,
    corrected: tuple[Path, Path] | None,
    as_json: bool,
) -> int:
    """Run plans with a rank of `world` and compare them with their prices, and return the exit code.

    earlier: rows of a stopped validation; None if there is none.
    corrected: files for the corrected profiles; None for none.
    """
    from vitpar.planner.measure.clock import load_share
    from vitpar.planner.measure.steps import PlanRunner, Training
    from vitpar.planner.report.accuracy import AccuracyRow, correction, measured_before

    machine, profile = costs.hardware, costs.model
    runner = PlanRunner(world, device_type, seconds)
    profiled = {"precision": profile.precision, "compile": profile.compiled}
    training = Training(recipe.model_copy(update={"train": recipe.train.model_copy(update=profiled)}), costs.whole)
    load, progress = load_share(), ProgressLines()  # load is read before our own processes run
    known = measured_before(prices, runner.agree(earlier)) if earlier is not None else []
    rows = [AccuracyRow(predicted, measured, profile.pace) for predicted, measured in zip(prices, known, strict=False)]
    favourite, done = min(range(len(prices)), key=lambda index: prices[index].seconds), sum(len(m.runs) for m in known)
    for run, (index, measured) in enumerate(runner.measure(training, plans, favourite, known), start=done + 1):
        # Appends in the first run of a plan, replaces in later ones.
        rows[index : index + 1] = [AccuracyRow(prices[index], measured, profile.pace)]
        if world.rank == 0:
            if out is not None:
                write(out, json.dumps(_to_json(rows, costs, load), indent=1) + "\n")
            progress(f"run {run}, of {max(run, 2 * len(plans))} or more: {plans[index]}")
    if world.rank == 0:
        if corrected is not None:
            missing = [row.memory - row.price.memory_bytes for row in rows if row.memory is not None]
            factors = correction([row.parts for row in rows], missing)
            for better, file in zip(factors.of(machine, profile), corrected, strict=True):
                better.save(file)
            complain(f"corrected profiles written to {corrected[0].parent}: {factors}")
        print(json.dumps(_to_json(rows, costs, load))) if as_json else _show(rows, costs, load)
    return 0


def _rows_of(out: Path, costs: "LayerCosts") -> list[dict]:
    """Return the rows of a validation in progress; none if there is no file yet.

    Raises PlannerError if it cannot be read, or is of other profiles.
    """
    from vitpar.planner.report.data import origin_to_json

    try:
        content = read_json(out)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise PlannerError(f"cannot resume from {out}: {shown(str(error))}: leave out --resume") from None
    wanted = origin_to_json(origin(), costs)
    same = ("model", "precision", "compiled", "hardware", "device", "notes")
    if not isinstance(content, dict) or any(content.get(key) != wanted[key] for key in same):
        raise PlannerError(f"cannot resume from {out}: it is of another model or other profiles: leave out --resume")
    rows = content.get("rows")
    return rows if isinstance(rows, list) else []


def _corrected_files(folder: Path, hardware: Path | None, model: Path | None) -> tuple[Path, Path]:
    """Make the folder for corrected profiles if needed and return their paths.

    Raises PlannerError if the folder cannot be made, or if the original profiles would be overwritten.
    """
    files = folder / "hardware.json", folder / "model.json"
    for path, source in zip(files, (hardware, model), strict=True):
        if path.resolve() == (source or Path(path.name)).resolve():
            raise PlannerError(f"--correct {folder} would overwrite the profile {path}: use another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlannerError(f"cannot make the folder {folder}: {error.strerror}") from None
    return files


def _plan(text: str, config: "ModelConfig", batch_size: int, ranks: int, microbatches: int | None) -> "Plan":
    from vitpar.strategy import parse
    from vitpar.strategy import validate as validated
    from vitpar.strategy.plan_json import read_plan

    plan = read_plan(text) if text.endswith(".json") else replace(parse(text), microbatches=microbatches)
    plan = plan.resolve(ranks) if plan.is_open else plan
    if plan.world_size != ranks:
        raise PlannerError(
            f"'{shown(plan)}' takes {count(plan.world_size, 'rank')} but the hardware was profiled with {ranks}: "
            f"profile it with --ranks {plan.world_size}, or give plans of {count(ranks, 'rank')}"
        )
    return validated(plan, config, batch_size)


def _to_json(rows: "list[AccuracyRow]", costs: "LayerCosts", load: float | None) -> dict:
    from vitpar.planner.report.accuracy import accuracy, others_used
    from vitpar.planner.report.data import origin_to_json

    summary = accuracy(rows)
    others = others_used(rows)
    return {
        **origin_to_json(origin(), costs),
        "batch_size": rows[0].price.batch_size,
        "time_error": {"mean": summary.time[0], "largest": summary.time[1]},
        "clocked_time_error": {"mean": summary.clocked[0], "largest": summary.clocked[1]},
        "slowdown": summary.slowdown,
        "others_share": load if others is None else others,
        "repeat": summary.repeat and {"mean": summary.repeat[0], "largest": summary.repeat[1]},
        "memory_error": summary.memory and {"mean": summary.memory[0], "largest": summary.memory[1]},
        "rank_correlation": summary.rank,
        "chosen_slower_than_best": summary.chosen,
        "rows": [row.to_json() | {"mfu": row.price.mfu(costs)} for row in rows],
    }


COLUMNS = ("predicted", "measured", "error", "predicted", "measured", "error")
"""Headings of the table: three for time, then three for memory."""


def _show(rows: "list[AccuracyRow]", costs: "LayerCosts", load: float | None) -> None:
    from vitpar.planner.cost.price import plan_title
    from vitpar.planner.report.accuracy import BUSY, accuracy, others_used
    from vitpar.planner.report.data import duration
    from vitpar.planner.report.uncertainty import uncertainty

    console = Console(highlight=False)
    best = min((row.price for row in rows), key=lambda price: price.seconds)
    ranks = count(best.plan.world_size, "rank")
    console.print(f"[bold]{model_words(costs, ranks)}, batch {best.batch_size:,}[/bold]", soft_wrap=True)
    print_origin(console, origin())
    lines = [
        (
            duration(row.price.seconds),
            duration(row.seconds),
            f"{row.time_error:+.1%}",
            size(row.price.memory_bytes),
            "" if row.memory is None else size(row.memory),
            "" if row.memory_error is None else f"{row.memory_error:+.1%}",
            plan_title(row.price.plan),
        )
        for row in sorted(rows, key=lambda row: row.seconds)
    ]
    print_plans(console, "time of a step, and memory of the fullest rank", COLUMNS, lines)
    summary, doubt, mfu = accuracy(rows), uncertainty(best, costs), best.mfu(costs)
    console.print(f"\ntime       {summary.time[0]:.1%} off on average, {summary.time[1]:.1%} at most")
    if doubt:
        console.print(f"expected   {doubt.source}", soft_wrap=True)
    if mfu is not None:
        console.print(f"MFU        {mfu * 100:.1f} % predicted for the fastest")
    if summary.memory:
        console.print(f"memory     {summary.memory[0]:.1%} off on average, {summary.memory[1]:.1%} at most")
    console.print(
        f"order      rank correlation {summary.rank:.3f}; the plan predicted to be fastest is {summary.chosen:.1%}"
    )
    console.print("           slower than the fastest measured plan")
    if summary.slowdown != 1:
        console.print(f"pace       the same work took {summary.slowdown:.0%} of the core time that it took when it")
        console.print("           was profiled; measured times are divided by this ratio, step by step;")
        console.print(
            f"           without it, predictions are {summary.clocked[0]:.1%} off, {summary.clocked[1]:.1%} at most"
        )
    if summary.repeat:
        console.print(f"repeat     repeated measurements of a plan differ by {summary.repeat[0]:.1%} on average,")
        console.print(f"           {summary.repeat[1]:.1%} at most: predictions cannot be checked more closely")
    others = others_used(rows)
    if others is not None:
        verdict = ": figures are not reliable" if others >= BUSY else ""
        words = f"other programs used {others:.0%} of the cores while plans were measured{verdict}"
    elif load is not None and load >= BUSY:
        words = f"programs used {load:.0%} of the cores in the minute before plans were measured (load average): "
        words += "figures are not reliable if they kept running"
    else:
        return
    console.print(f"others     {words}", soft_wrap=True)
