"""`vitpar search`: the plan with the most images a second that fits into memory."""

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitpar.errors import PlannerError
from vitpar.limits import MAX_BATCH_SIZE
from vitpar.text import count, size
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
        typer.Option("--batch-size", metavar="N[,N…]", help="Images of a step; of several the best is chosen."),
    ] = None,
    precision: o.Precision = None,
    roles: Annotated[str, typer.Option("--roles", metavar="NAMES", help="Roles that plans may use.")] = "pp,dp,fsdp,tp",
    without: Annotated[
        str, typer.Option("--without", metavar="FLAGS", help="Flags or schedules to leave out, as in ckpt,2d,gpipe.")
    ] = "",
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, help="Longest time to search, once a plan is found.")
    ] = 60.0,
    report: profiled.ReportFile = None,
    trace_file: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Write the best plan's step, for chrome://tracing.")
    ] = None,
    as_json: o.AsJson = False,
    assignments: o.Assignments = None,
) -> None:
    """Find the plan with the most images a second whose ranks need no more memory than there is.

    It reads two profiles and needs no devices. With --cluster a data sheet takes their place: figures are estimates.

    Example: vitpar search --memory 2GB --out plan.json && vitpar train --mesh plan.json

    Example: vitpar search --cluster 8xH100 --model vit_huge_patch14_224 --batch-size 1024 --precision bf16
    """
    profiled.refuse_mixed(cluster, hardware, model_profile, num_classes)
    refuse_unwritable(out, report, trace_file)
    merged = profiled.planned_recipe(recipe, o.settings(search, locals()), assignments)
    sizes = profiled.numbers(batch_sizes, "--batch-size", MAX_BATCH_SIZE) if batch_sizes else (merged.train.batch_size,)
    budget = None if memory is None else profiled.parse_size(memory)

    from vitpar.planner.report.data import findings, trace
    from vitpar.planner.report.page import page
    from vitpar.planner.search.best import Search
    from vitpar.planner.search.expand import Effort
    from vitpar.planner.search.space import FLAGS, Space
    from vitpar.strategy import SCHEDULES, validate
    from vitpar.strategy.plan_json import write_plan
    from vitpar.training.optim.optimizer import moments
    from vitpar_cli.search_view import SearchProgress, show

    costs = profiled.costs_of(merged, cluster, hardware, model_profile, num_classes, ranks)
    machine = costs.hardware
    if ranks is not None and ranks > machine.ranks:
        raise PlannerError(
            f"--ranks {ranks} is more than the {count(machine.ranks, 'rank')} of {machine.name}: profile the hardware "
            "with as many, or use --cluster"
        )
    left_out = {word.strip().lstrip("+") for word in without.split(",") if word.strip()}
    if wrong := left_out - {*FLAGS, *SCHEDULES}:
        raise PlannerError(f"unknown flag '{min(wrong)}' in --without: use {', '.join((*FLAGS, *SCHEDULES))}")
    unprofiled = profiled.unknown(costs, ranks or machine.ranks)
    space = Space(
        costs.config,
        ranks or machine.ranks,
        sizes,
        costs.model.precision,
        costs.model.compiled,
        roles=_roles(roles),
        flags=tuple(flag for flag in profiled.known_flags(costs) if flag not in left_out),
        schedules=tuple(name for name in SCHEDULES if name not in left_out),
        tensors=costs.model.tensors,
    )
    searching = Search(space, costs, moments(merged), Effort(seconds=seconds))
    limit = budget or profiled.usual_budget(costs)
    with SearchProgress(shown=not as_json) as progress:
        result = searching.best(limit, progress)
        if not result.plans:
            raise PlannerError(
                f"no plan fits into {size(limit)} a rank: allow more --memory, more --ranks, "
                "a smaller --batch-size, or fewer things in --without"
            )
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
        useful = (name for name in sorted(unprofiled) if "tp" in space.roles or not name.startswith("tp"))
        if missing := [name for name in useful if not left_out & {*name.split("+")}]:
            typer.echo(f"not looked at, since the profiles lack it: {', '.join(missing)}", err=True)


def _train_command(best: "Price", costs: "LayerCosts", out: Path | None, recipe: Path | None, model: str | None) -> str:
    """The command that trains the best plan: with the file `out`, or with all that a strategy does not say."""
    plan = best.plan
    words = ["vitpar", "train", "--mesh", str(out) if out else str(plan)]
    if out is None:
        words += ["--microbatches", str(plan.microbatches or 1)]
        if plan.pipeline_degree > 1:
            words += ["--schedule", plan.schedule]
            words += ["--virtual-stages", str(plan.virtual_stages)] if plan.virtual_stages > 1 else []
            words += ["--split", plan.split if isinstance(plan.split, str) else ",".join(map(str, plan.split))]
    words += ["--batch-size", str(best.batch_size), "--precision", costs.model.precision]
    words += ["--recipe", str(recipe)] if recipe else []
    words += ["--model", model] if model else []
    return shlex.join(words) + (" --data DIR" if model and not recipe else "")


def _roles(text: str) -> tuple[str, ...]:
    from vitpar.planner.search.space import ROLES

    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if unknown := set(names) - set(ROLES):
        raise PlannerError(f"unknown role '{min(unknown)}' in --roles: use {', '.join(ROLES)}")
    return names
