"""`vitpar scaling`: how speed grows with devices, by simulation."""

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from vitpar.errors import PlannerError
from vitpar.limits import MAX_RANKS
from vitpar_cli import profiled
from vitpar_cli import recipe_options as o
from vitpar_cli.outputs import refuse_unwritable, write

if TYPE_CHECKING:
    from vitpar.planner.cost.layer import LayerCosts
    from vitpar.planner.search.scaling import Point


def scaling(
    recipe: o.RecipeFile = None,
    hardware: profiled.HardwareFile = None,
    model_profile: profiled.ModelFile = None,
    cluster: profiled.ClusterName = None,
    model: o.ModelName = None,
    num_classes: profiled.NumClasses = None,
    ranks: Annotated[
        str | None,
        typer.Option("--ranks", metavar="N,N…", help="Numbers of ranks.  \\[default: all, half of them, a quarter, …]"),
    ] = None,
    batch_size: Annotated[
        int | None,
        o.setting(
            "train.batch_size",
            "--batch-size",
            min=1,
            help="Images of a step: on the most ranks (weak), on any (strong).",
        ),
    ] = None,
    memory: profiled.MemorySize = None,
    precision: o.Precision = None,
    report: profiled.ReportFile = None,
    as_json: o.AsJson = False,
    assignments: o.Assignments = None,
) -> None:
    """Search the best plan for fewer and more ranks and show how speed grows: weak scaling, with as many images for
    each rank, and strong scaling, with as many images in all.

    Example: vitpar scaling --cluster 8x8xH100 --model vit_huge_patch14_224 --batch-size 4096 --precision bf16
    """
    profiled.refuse_mixed(cluster, hardware, model_profile, num_classes)
    refuse_unwritable(report)
    merged = profiled.planned_recipe(recipe, o.settings(scaling, locals()), assignments)
    limit = None if memory is None else profiled.parse_size(memory)

    from vitpar.planner.report.data import provenance, scaling_to_json
    from vitpar.planner.report.page import scaling_page
    from vitpar.planner.search.scaling import best_on, images
    from vitpar.planner.search.space import Space
    from vitpar.training.optim.optimizer import moments

    def costs(number: int | None) -> "LayerCosts":
        return profiled.costs_of(merged, cluster, hardware, model_profile, num_classes, number)

    whole = costs(None)
    most, notes = whole.hardware.ranks, provenance(whole.hardware, whole.model)
    chosen = tuple(sorted(set(profiled.numbers(ranks, "--ranks", MAX_RANKS)))) if ranks else _halves(most)
    if chosen[-1] > most:
        raise PlannerError(f"--ranks {chosen[-1]} is more than the {most} of {whole.hardware.name}: use at most {most}")
    size = merged.train.batch_size
    wanted = {
        kind: [(number, images(kind, size, number, chosen[-1])) for number in chosen] for kind in ("weak", "strong")
    }
    known: dict[tuple[int, int], Point] = {}
    for number, batch in dict.fromkeys(pair for pairs in wanted.values() for pair in pairs):
        if sys.stderr.isatty() and not as_json:
            print(f"\r{number} ranks, batch {batch} …   ", end="", file=sys.stderr)
        here = costs(number) if cluster else whole
        numeric = here.model.precision, here.model.compiled
        flags, budget = profiled.known_flags(here), limit or profiled.usual_budget(here)
        space = Space(here.config, number, (batch,), *numeric, flags=flags, tensors=here.model.tensors)
        known[number, batch] = best_on(number, batch, space, here, budget, moments(merged))
    if sys.stderr.isatty() and not as_json:
        print(file=sys.stderr)
    found = {kind: [known[pair] for pair in pairs] for kind, pairs in wanted.items()}
    if not any(point.price for points in found.values() for point in points):
        raise PlannerError("no plan fits on any number of ranks: allow more --memory or another --batch-size")
    title = f"{whole.config.name} in {whole.model.precision} on up to {chosen[-1]} x {whole.hardware.device_name}"
    if report is not None:
        write(report, scaling_page(title, found, notes))
    if as_json:
        typer.echo(json.dumps(scaling_to_json(found, notes)))
        return
    console = Console(highlight=False)
    console.print(f"[bold]{title}[/bold]")
    for note in notes:
        console.print(note, style="yellow", soft_wrap=True)
    for kind, points in found.items():
        console.print(_table(kind, points))
    if report is not None:
        console.print(f"written    {report}", soft_wrap=True)


def _halves(most: int) -> tuple[int, ...]:
    """All ranks, half of them, and so on while that is whole."""
    found = [most]
    while found[-1] % 2 == 0:
        found.append(found[-1] // 2)
    return tuple(reversed(found))


def _table(kind: str, points: "list[Point]") -> Table:
    from vitpar.planner.report.data import plan_title
    from vitpar.planner.search.scaling import efficiency

    table = Table("ranks", "batch", box=box.SIMPLE, title=f"{kind} scaling", title_justify="left")
    for heading in ("images/s", "a rank", "efficiency", "at most better by"):
        table.add_column(heading, justify="right")
    table.add_column("plan")
    for point, part in zip(points, efficiency(points), strict=True):
        if point.price is None or part is None:
            table.add_row(str(point.ranks), str(point.batch_size), *("",) * 4, "no plan fits")
            continue
        figures = (f"{point.price.images_per_second:,.0f}", f"{point.per_rank:,.1f}", f"{part:.1%}", f"{point.gap:.1%}")
        table.add_row(str(point.ranks), str(point.batch_size), *figures, plan_title(point.price.plan))
    return table
