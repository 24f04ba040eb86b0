"""`vitpar validate`: predictions beside measurements."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from vitpar.errors import PlannerError
from vitpar.text import count, shown
from vitpar_cli import recipe_options as o
from vitpar_cli.outputs import refuse_unwritable, write
from vitpar_cli.profiled import HardwareFile, ModelFile, profiled_costs
from vitpar_cli.world import choose_device, end, enter, resolve

if TYPE_CHECKING:
    from vitpar.models import ViTConfig
    from vitpar.planner.report.accuracy import Row
    from vitpar.strategy import Plan


def validate(
    plans: Annotated[
        list[str] | None,
        typer.Argument(metavar="PLAN…", help="Strategies or plan.json files.  \\[default: some of every kind]"),
    ] = None,
    recipe: o.RecipeFile = None,
    hardware: HardwareFile = None,
    model_profile: ModelFile = None,
    batch_size: o.BatchSize = None,
    microbatches: o.Microbatches = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0.01, help="Time to spend on each run of a plan.")] = 2.0,
    device: o.DeviceName = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write all rows as JSON.")] = None,
    correct: Annotated[
        Path | None,
        typer.Option(
            "--correct",
            metavar="FOLDER",
            help="Write both profiles there, corrected by what was measured, for a search.",
        ),
    ] = None,
    as_json: o.AsJson = False,
) -> None:
    """Run plans for a few steps and print what was predicted beside what was measured.

    The plans need as many ranks as the hardware was profiled with. Each runs in processes of its own, on random images:
    all plans once, all again, a third time those whose two runs disagree, and at the end the fastest in turns.

    Example: vitpar validate dp4 fsdp4 pp2xdp2 plan.json
    """
    from vitpar.planner.cost.price import price
    from vitpar.planner.measure.steps import example_plans
    from vitpar.planner.report.accuracy import Row, correction
    from vitpar.strategy.support import refuse_clashes
    from vitpar.training.optim.optimizer import moments

    files = any(text.endswith(".json") for text in plans or ())
    if microbatches is not None and (files or not plans):
        raise PlannerError("--microbatches is given beside plans that have their own: give it with strategies alone")
    corrected = None if correct is None else _corrected_files(correct, hardware, model_profile)
    refuse_unwritable(out, *(corrected or ()))
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # or processes that we fork could not use GPUs
    # --microbatches is for the plans that are named, not for the recipe's.
    merged = o.merged_recipe(recipe, {"train.batch_size": batch_size}, None)
    kind, costs, size = choose_device(device), profiled_costs(hardware, model_profile, merged), merged.train.batch_size
    machine, profile = costs.hardware, costs.model
    if plans:
        chosen = [_plan(text, costs.config, size, machine.ranks, microbatches) for text in plans]
        for plan in chosen:
            refuse_clashes(plan, profile.precision, profile.compiled)
    else:
        chosen = list(example_plans(costs.config, machine.ranks, size, profile.precision, profile.compiled))
    if not chosen:
        raise PlannerError(
            f"no example plan fits a batch of {size} on {count(machine.ranks, 'rank')}: name plans, or another "
            "--batch-size"
        )
    prices = [price(plan, costs, size, moments(merged)) for plan in chosen]
    resolve(chosen[0], kind)  # refuses ranks that a launcher or the GPUs do not give
    world = enter(machine.ranks, kind)

    from vitpar.planner.measure.steps import Runner, Training

    runner = Runner(world, kind, seconds)
    profiled = {"precision": profile.precision, "compile": profile.compiled}
    training = Training(merged.model_copy(update={"train": merged.train.model_copy(update=profiled)}), costs.config)
    console = Console(highlight=False)
    rows: list[Row] = []
    favourite = min(range(len(prices)), key=lambda index: prices[index].seconds)
    for run, (index, measured) in enumerate(runner.measure(training, chosen, favourite), start=1):
        rows[index : index + 1] = [Row(prices[index], measured, profile.pace)]  # the first run of a plan appends
        if world.rank == 0:
            if out is not None:
                write(out, json.dumps(_to_json(rows), indent=1) + "\n")
            if not as_json and sys.stderr.isatty():
                print(f"run {run} of {2 * len(chosen)} and some more: {chosen[index]}", file=sys.stderr)
    if world.rank == 0:
        if corrected is not None:
            found = correction([row.evidence for row in rows])
            better = found.of(machine, profile)
            better[0].save(corrected[0])
            better[1].save(corrected[1])
            print(f"corrected profiles written to {correct}: {found}", file=sys.stderr)
        print(json.dumps(_to_json(rows))) if as_json else _show(console, rows)
    end(world)


def _corrected_files(folder: Path, hardware: Path | None, model: Path | None) -> tuple[Path, Path]:
    """Where corrected profiles go: a folder, made if needed, in which the profiles are not themselves."""
    files = folder / "hardware.json", folder / "model.json"
    for path, source in zip(files, (hardware, model), strict=True):
        if path.resolve() == (source or Path(path.name)).resolve():
            raise PlannerError(f"--correct {folder} would overwrite the profile {path}: name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlannerError(f"cannot make the folder {folder}: {error.strerror}") from None
    return files


def _plan(text: str, config: "ViTConfig", batch_size: int, ranks: int, microbatches: int | None) -> "Plan":
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


def _to_json(rows: "list[Row]") -> dict:
    from vitpar.planner.report.accuracy import accuracy

    found = accuracy(rows)
    return {
        "time_error": {"mean": found.time[0], "largest": found.time[1]},
        "clocked_time_error": {"mean": found.clocked[0], "largest": found.clocked[1]},
        "slowdown": found.slowdown,
        "repeat": found.repeat and {"mean": found.repeat[0], "largest": found.repeat[1]},
        "memory_error": found.memory and {"mean": found.memory[0], "largest": found.memory[1]},
        "rank_correlation": found.rank,
        "chosen_slower_than_best": found.chosen,
        "rows": [row.to_json() for row in rows],
    }


def _show(console: Console, rows: "list[Row]") -> None:
    from vitpar.planner.report.accuracy import accuracy
    from vitpar.planner.report.data import schedule_words

    table = Table("plan", box=box.SIMPLE)
    for heading in ("predicted ms", "measured ms", "error", "predicted MB", "measured MB", "error"):
        table.add_column(heading, justify="right")
    for row in sorted(rows, key=lambda row: row.seconds):
        plan = row.price.plan
        words = f"{plan}{schedule_words(plan)}" + f" {plan.microbatches}" * ((plan.microbatches or 1) > 1)
        memory = "" if row.memory is None else f"{row.memory / 1e6:,.1f}"
        table.add_row(
            words,
            f"{row.price.seconds * 1e3:,.1f}",
            f"{row.seconds * 1e3:,.1f}",
            f"{row.time_error:+.1%}",
            f"{row.price.memory_bytes / 1e6:,.1f}",
            memory,
            "" if row.memory_error is None else f"{row.memory_error:+.1%}",
        )
    console.print(table)
    found = accuracy(rows)
    console.print(f"time       {found.time[0]:.1%} off in the mean, {found.time[1]:.1%} at most")
    if found.memory:
        console.print(f"memory     {found.memory[0]:.1%} off in the mean, {found.memory[1]:.1%} at most")
    console.print(f"order      rank correlation {found.rank:.3f}; predicted to be the fastest and {found.chosen:.1%}")
    console.print("           slower than the fastest that was measured")
    if found.slowdown != 1:
        console.print(f"pace       the same work took {found.slowdown:.0%} of the cores' time that it took when")
        console.print("           they were profiled; times are divided by that, step by step;")
        console.print(
            f"           by the clock predictions are {found.clocked[0]:.1%} off, {found.clocked[1]:.1%} at most"
        )
    if found.repeat:
        console.print(f"repeat     measured again, plans took {found.repeat[0]:.1%} more or less in the mean,")
        console.print(f"           {found.repeat[1]:.1%} at most: no prediction can be known to be nearer than that")
