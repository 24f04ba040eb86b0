"""`vitpar search`: find the plan with the most images per second that fits into memory."""

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitpar.limits import MAX_BATCH_SIZE
from vitpar.sizes import parse_size
from vitpar.terminal import complain
from vitpar.training.recipe.sections import ParallelSection
from vitpar_cli import profiled
from vitpar_cli import recipe_options as o
from vitpar_cli.outputs import origin, refuse_unwritable, write

if TYPE_CHECKING:
    from vitpar.planner.cost.layer import LayerCosts
    from vitpar.planner.cost.price import Price


def search(
    memory: profiled.MemorySize = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the best plan as JSON.")] = None,
    recipe: o.RecipeFile = None,
    hardware: profiled.HardwareFile = None,
    model_profile: profiled.ModelFile = None,
    cluster: profiled.ClusterName = None,
    model: o.ModelName = None,
    num_classes: profiled.NumClasses = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", min=1, help="Ranks to plan for.  \\[default: as profiled, or the cluster's]"),
    ] = None,
    batch_sizes: Annotated[
        str | None,
        typer.Option("--batch-size", metavar="N[,N…]", help="Images per step; with several, the best is chosen."),
    ] = None,
    microbatches: Annotated[
        str | None,
        typer.Option(
            "--microbatches", metavar="N[,N…]", help="Micro-batches per step.  \\[default: all that divide the batch]"
        ),
    ] = None,
    precision: o.Precision = None,
    roles: Annotated[str, typer.Option("--roles", metavar="NAMES", help="Roles that plans may use.")] = "pp,dp,fsdp,tp",
    without: Annotated[
        str, typer.Option("--without", metavar="FLAGS", help="Flags or schedules to leave out, as in ckpt,2d,gpipe.")
    ] = "",
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, help="Maximum search time in seconds, once a plan is found.")
    ] = 20.0,
    report: profiled.ReportFile = None,
    trace_file: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Write a trace of the best plan's step for chrome://tracing."),
    ] = None,
    as_json: o.AsJson = False,
    assignments: o.Assignments = None,
) -> None:
    """Find the plan with the most images per second that fits into the memory of each rank.

    It reads two profiles and needs no devices. With --cluster it uses a data sheet instead, so all figures are
    estimates.

    Example: vitpar search --memory 2GB --out plan.json && vitpar train --mesh plan.json

    Example: vitpar search --cluster 8xH100 --model vit_huge_patch14_224 --batch-size 1024 --precision bf16
    """
    profiled.refuse_mixed(cluster, hardware, model_profile, num_classes)
    refuse_unwritable(out, report, trace_file)
    merged = profiled.planned_recipe(recipe, o.checked_settings(search, locals()), assignments)
    sizes = profiled.numbers(batch_sizes, "--batch-size", MAX_BATCH_SIZE) if batch_sizes else (merged.train.batch_size,)
    counts = profiled.numbers(microbatches, "--microbatches", MAX_BATCH_SIZE) if microbatches else None
    budget = None if memory is None else parse_size(memory)

    from vitpar.planner.automatic import make_search, run_search
    from vitpar.planner.report.data import findings, trace
    from vitpar.planner.report.page import page
    from vitpar.planner.sources import unprofiled, usual_budget
    from vitpar.strategy import validate
    from vitpar.strategy.plan_json import write_plan
    from vitpar.training.optim.optimizer import moments
    from vitpar_cli.search_view import SearchProgress, show

    costs = profiled.costs_of(merged, cluster, hardware, model_profile, num_classes, ranks)
    left_out = {word.lstrip("+") for word in _words(without)}
    searching = make_search(
        costs,
        sizes,
        moments(merged),
        ranks=ranks,
        microbatches=counts,
        roles=_words(roles),
        without=left_out,
        seconds=seconds,
    )
    limit = budget or usual_budget(costs)
    with SearchProgress(shown=not as_json) as progress:
        result = run_search(searching, limit, progress)
        found = findings(searching, result, limit, origin(), _train_command(result.plans[0], costs, out, recipe, model))
    best = result.plans[0]
    chosen = validate(best.plan, costs.config, best.batch_size)
    if out is not None:
        write_plan(out, chosen)
    if report is not None:
        write(report, page(found, moments(merged)))
    if trace_file is not None:
        write(trace_file, json.dumps(trace(best, costs, found.origin)) + "\n")
    if as_json:
        typer.echo(json.dumps(found.to_json()))
    else:
        show(found, out, report, trace_file)
        lacking = sorted(unprofiled(costs, searching.space.ranks))
        useful = (name for name in lacking if "tp" in searching.space.roles or not name.startswith("tp"))
        if missing := [name for name in useful if not left_out & {*name.split("+")}]:
            complain(f"not searched, because the profiles lack it: {', '.join(missing)}")


def _train_command(best: "Price", costs: "LayerCosts", out: Path | None, recipe: Path | None, model: str | None) -> str:
    """Return the command that trains with the best plan.

    It uses the file `out` if there is one, and otherwise options for all settings that the strategy does not contain.
    """
    plan = best.plan
    words = ["vitpar", "train", "--mesh", str(out) if out else str(plan)]
    if out is None:
        settings = ParallelSection.of(plan).model_dump(exclude_unset=True, exclude={"mesh"})
        for name, value in settings.items():
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            words += [f"--{name.replace('_', '-')}", text]
    words += ["--batch-size", str(best.batch_size), "--precision", costs.model.precision]
    words += ["--recipe", str(recipe)] if recipe else []
    words += ["--model", model] if model else []
    return shlex.join(words) + (" --data DIR" if model and not recipe else "")


def _words(text: str) -> list[str]:
    """Return the words of a comma-separated list such as `dp, tp`."""
    return [word.strip() for word in text.split(",") if word.strip()]
