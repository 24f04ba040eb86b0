"""`vitpar search`: find the plan with the most samples per second that fits into memory."""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import typer

from vitpar.errors import PlannerError, UserError
from vitpar.limits import MAX_BATCH_SIZE, MAX_IMAGE_SIZE
from vitpar.planner.automatic import make_search, run_search
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import Price
from vitpar.planner.profile.cluster import find_cluster
from vitpar.planner.report.data import search_record
from vitpar.planner.report.page import page
from vitpar.planner.report.tables import best_row
from vitpar.planner.search.gains import MORE, gains
from vitpar.planner.sources import unprofiled
from vitpar.planner.training_time import training_time
from vitpar.recipe import Recipe
from vitpar.recipe.request import RecipeRequest
from vitpar.recipe.sections.running import ParallelSection
from vitpar.strategy import validate
from vitpar.strategy.plan_json import write_plan
from vitpar.terminal import complain
from vitpar.training.optim.state_memory import moments
from vitpar_cli import recipe_options as o
from vitpar_cli.outputs import origin, print_json, refuse_undrawable, refuse_unwritable, write
from vitpar_cli.profiled import MachineOptions, ReportFile, machine_options, numbers, planned_recipe
from vitpar_cli.search_view import SearchProgress, show, show_comparison

ROW_SECONDS = 2.0
"""Default limit of a search for one row of a table, in seconds."""


@o.shared(
    asked=o.recipe("recipe", "assignments", "task", "weights", "data", "epochs", "precision"),
    machine=machine_options(
        cluster="8xH100, 4x8xA100-40GB or a TOML file, instead of --hardware. Several with commas make a table."
    ),
)
def search(
    asked: RecipeRequest,
    machine: MachineOptions,
    out: Path | None = typer.Option(None, "--out", metavar="FILE", help="Write the best plan as JSON."),
    model: str | None = typer.Option(
        None,
        "--model",
        metavar="NAME[,NAME…]",
        help="timm model name, such as vit_small_patch16_224, whose sizes replace the recipe's; or a model of your "
        "own as FILE.py:NAME, whose file is run. Several make a table.",
        rich_help_panel=o.PANELS["model"],
    ),
    image_sizes: str | None = typer.Option(
        None,
        "--image-size",
        metavar="N[,N…]",
        help="Pixels a side, instead of the model's. Several make a table.",
        rich_help_panel=o.PANELS["model"],
    ),
    ranks: int | None = typer.Option(
        None, "--ranks", min=1, help="Ranks to plan for.  \\[default: as profiled, or the cluster's]"
    ),
    batch_sizes: str | None = typer.Option(
        None,
        "--batch-size",
        metavar="N[,N…]",
        help="Images per step; with several, a table shows each, and the best is chosen.",
    ),
    microbatches: str | None = typer.Option(
        None, "--microbatches", metavar="N[,N…]", help="Micro-batches per step.  \\[default: all that divide the batch]"
    ),
    roles: str = typer.Option("pp,dp,fsdp,tp", "--roles", metavar="NAMES", help="Roles that plans may use."),
    without: str = typer.Option(
        "", "--without", metavar="FLAGS", help="Flags or schedules to leave out, as in ckpt,2d,gpipe."
    ),
    seconds: float | None = typer.Option(
        None,
        "--seconds",
        min=0.1,
        help="Maximum search time in seconds, once a plan is found.  \\[default: 20, or 2 for a row of a table]",
    ),
    report: ReportFile = None,
    as_json: o.AsJson = False,
) -> None:
    """Find the plan with the most samples per second that fits into the memory of each rank.

    It reads two profiles and needs no devices. With --cluster it uses a data sheet instead, so all figures are
    estimates. It also says how long the complete training takes, what limits it, and what would help most. With several
    clusters, models or image sizes it prints a table with the best plan of each combination.

    Example: vitpar search --memory 2GB --out plan.json && vitpar train --mesh plan.json

    Example: vitpar search --cluster 8xH100 --model vit_huge_patch14_224 --batch-size 1024 --precision bf16

    Example: vitpar search --cluster 8xH100,4x8xA100,8xL40S --model vit_large_patch16_224 --batch-size 1024,4096
    """
    cluster = machine.cluster
    clusters = (cluster,) if cluster and os.path.isfile(cluster) else tuple(_words(cluster or ""))
    models = tuple(filter(None, map(o.own_model, _words(model or "")))) or (None,)
    sizes = numbers(image_sizes, "--image-size", MAX_IMAGE_SIZE) or (None,)
    batches = numbers(batch_sizes, "--batch-size", MAX_BATCH_SIZE)
    tabled = max(len(clusters), len(models), len(sizes)) > 1
    if tabled:
        if single := "--out" if out else "--report" if report else None:
            raise PlannerError(
                f"{single} is of one search, but several clusters, models or image sizes are given: leave it out, or "
                "give one of each"
            )
        if not cluster:
            raise PlannerError(
                "several models or image sizes are given, but profiles are of one model: add --cluster, as in "
                "--cluster 8xH100"
            )
    refuse_unwritable(out, report)
    refuse_undrawable(report)
    left_out = frozenset(word.lstrip("+") for word in _words(without))
    limits: dict[str, Any] = {
        "ranks": ranks,
        "microbatches": numbers(microbatches, "--microbatches", MAX_BATCH_SIZE) or None,
        "roles": _words(roles),
        "without": left_out,
        **({"seconds": seconds} if seconds else {}),
    }
    merged = _recipe(asked, models[0], sizes[0])
    machines = [replace(machine, cluster=name) for name in clusters] or [machine]
    wanted = asked, limits, models, sizes, machines, batches
    if tabled:
        with SearchProgress() as progress:
            rows = list(_table(*wanted, progress))
        show_comparison(rows, as_json)
        return
    costs = machine.costs(merged, ranks)
    state, budget = moments(merged, costs.whole), machine.budget(costs)
    searching = make_search(costs, batches or (merged.train.batch_size,), state, **limits)
    with SearchProgress() as progress:
        result = run_search(searching, budget, progress)
        best, larger = result.plans[0], searching.best(MORE * budget, effort=searching.short).plans[:1]
        found = search_record(
            *(searching, result, budget, origin()),
            train=_train_command(best, costs, out, asked, model, bool(image_sizes)),
            training=training_time(best, machine.length(merged, costs.hardware.ranks)),
            gains=gains((*result.plans, *larger), costs, budget, state),
        )
        found["batch_sizes"] = list(_table(*wanted, progress)) if len(batches) > 1 else []
    if out is not None:
        write_plan(out, validate(best.plan, costs.config, best.batch_size))
    if report is not None:
        write(report, page(found, costs, state))
    if as_json:
        print_json(found)
    else:
        show(found, (out, report))
        lacking = sorted(unprofiled(costs, searching.space.ranks))
        useful = (name for name in lacking if "tp" in searching.space.roles or not name.startswith("tp"))
        if missing := [name for name in useful if not left_out & {*name.split("+")}]:
            complain(f"not searched, because the profiles lack it: {', '.join(missing)}")


def _words(text: str) -> list[str]:
    """Return the words of a comma-separated list such as `dp, tp`."""
    return [word.strip() for word in text.split(",") if word.strip()]


def _recipe(asked: RecipeRequest, model: str | None, image_size: int | None) -> Recipe:
    """Return the recipe with this model and image size; None for its own."""
    return planned_recipe(asked | {"model.name": model, "model.image_size": image_size})


def _table(
    asked: RecipeRequest,
    limits: Mapping[str, Any],
    models: Sequence[str | None],
    image_sizes: Sequence[int | None],
    machines: Sequence[MachineOptions],
    batch_sizes: Sequence[int],
    progress: SearchProgress,
) -> Iterator[dict[str, Any]]:
    """Yield the best plan of each combination, or why it has none.

    limits: parameters of ``vitpar.planner.automatic.make_search``.
    batch_sizes: none for the recipe's.

    Raises UserError for names and options that no combination could use.
    """
    names = [find_cluster(one.cluster).name if one.cluster else "" for one in machines]
    for model in models:
        _recipe(asked, model, None).config(1)  # refuses unknown names
    combinations = list(product(models, image_sizes, zip(machines, names, strict=True)))
    for number, (model, image_size, (machine, name)) in enumerate(combinations):
        recipe, costs, why = _recipe(asked, model, image_size), None, ""
        place = recipe.model.name, image_size or recipe.model.image_size or 0, name
        try:
            costs = machine.costs(recipe, limits["ranks"])
            place = costs.config.name, costs.config.image_size, costs.hardware.name
        except UserError as error:
            why = str(error)
        sizes = batch_sizes or (recipe.train.batch_size,)
        for done, batch_size in enumerate(sizes, start=number * len(sizes) + 1):
            where = dict(zip(("model", "image_size", "cluster"), place, strict=True)) | {"batch_size": batch_size}
            if costs is None:
                yield where | {"why": why}
                continue
            total, size = len(combinations) * len(sizes), f"{place[1]} pixels on {place[2]}"
            progress.about = f"{done} of {total}: {place[0]}, {size}, batch {batch_size:,}"
            state = moments(recipe, costs.whole)
            searching = make_search(costs, (batch_size,), state, **{"seconds": ROW_SECONDS, **limits})
            length = machine.length(recipe, costs.hardware.ranks)
            yield best_row(where, searching, machine.budget(costs), length, progress)


def _train_command(
    best: Price, costs: LayerCosts, out: Path | None, asked: RecipeRequest, model: str | None, resized: bool
) -> str:
    """Return the command that trains with the best plan.

    It uses the file `out` if there is one, and otherwise options for all settings that the strategy does not contain.
    """
    plan = best.plan
    command = ["vitpar", "train", "--mesh", str(out) if out else str(plan)]
    if out is None:
        settings = ParallelSection.of(plan).model_dump(exclude_unset=True, exclude={"mesh"})
        for name, value in settings.items():
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            command += [f"--{name.replace('_', '-')}", text]
    command += ["--batch-size", str(best.batch_size), "--precision", costs.model.precision]
    given = {"model.name": model, "model.image_size": costs.config.image_size if resized else None}
    command += o.words(asked | given, without=("train.precision",))
    needed = asked.path is None and not asked.names_data and (model or asked.given.get("task.name"))
    return shlex.join(command) + (" --data DIR" if needed else "")
