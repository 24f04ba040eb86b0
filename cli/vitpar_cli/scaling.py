"""`vitpar scaling`: predict how speed grows with the number of devices."""

from typing import Any

import typer
from rich.console import Console

from vitpar.errors import PlannerError
from vitpar.limits import MAX_RANKS
from vitpar.planner.automatic import make_search
from vitpar.planner.report.data import origin_to_json
from vitpar.planner.report.page import scaling_page
from vitpar.planner.report.tables import (
    COLUMN_WORDS,
    WORDS,
    best_row,
    images,
    scaling_notes,
    scaling_table,
    with_efficiency,
)
from vitpar.recipe.request import RecipeRequest
from vitpar.text import count
from vitpar.training.optim.state_memory import moments
from vitpar_cli import recipe_options as o
from vitpar_cli.outputs import Status, origin, print_json, print_words, refuse_undrawable, refuse_unwritable, write
from vitpar_cli.profiled import MachineOptions, ReportFile, machine_options, numbers, planned_recipe
from vitpar_cli.search_view import model_words, print_origin, print_plans


@o.shared(
    asked=o.recipe(
        *(*o.SUBJECT, "epochs", "batch_size", "precision"),
        batch_size="Images per step: on the most ranks (weak), on any number (strong).",
    ),
    machine=machine_options(),
)
def scaling(
    asked: RecipeRequest,
    machine: MachineOptions,
    ranks: str | None = typer.Option(
        None, "--ranks", metavar="N,N…", help="Numbers of ranks.  \\[default: all, half of them, a quarter, …]"
    ),
    report: ReportFile = None,
    as_json: o.AsJson = False,
) -> None:
    """Search for the best plan on several numbers of ranks and show how speed grows with them.

    Weak scaling keeps the number of images per rank, strong scaling the total number of images.

    Example: vitpar scaling --cluster 8x8xH100 --model vit_huge_patch14_224 --batch-size 4096 --precision bf16
    """
    refuse_unwritable(report)
    refuse_undrawable(report)
    merged = planned_recipe(asked, doing=f"a prediction of scaling{' and cost' * bool(machine.conditions)}")

    whole = machine.costs(merged)
    most = whole.hardware.ranks
    chosen = sorted(set(numbers(ranks, "--ranks", MAX_RANKS))) or [most]
    while ranks is None and chosen[0] % 2 == 0:
        chosen.insert(0, chosen[0] // 2)
    if chosen[-1] > most:
        raise PlannerError(f"--ranks {chosen[-1]} is more than the {most} of {whole.hardware.name}: use at most {most}")
    size = merged.train.batch_size
    wanted = {regime: [(number, images(regime, size, number, chosen[-1])) for number in chosen] for regime in WORDS}
    known: dict[tuple[int, int], dict[str, Any]] = {}
    length = machine.length(merged, most)
    with Status() as status:
        for number, batch in dict.fromkeys(pair for pairs in wanted.values() for pair in pairs):
            status.tell(f"searching for {count(number, 'rank')}, batch {batch}")
            here = machine.costs(merged, number) if machine.cluster else whole
            searching = make_search(here, (batch,), moments(merged, here.whole), ranks=number)
            where = {"ranks": number, "batch_size": batch}
            known[number, batch] = best_row(where, searching, machine.budget(here), length)
    found = origin_to_json(origin(), whole)
    found |= {str(regime): with_efficiency([known[pair] for pair in pairs]) for regime, pairs in wanted.items()}
    if not any("plan" in point for point in known.values()):
        raise PlannerError("no plan fits on any number of ranks: allow more --memory or another --batch-size")
    devices = f"up to {count(chosen[-1], 'rank')}"
    title = f"{model_words(found, devices)}, batch {size:,}"
    if report is not None:
        write(report, scaling_page(title, found))
    if as_json:
        print_json(found)
        return
    console = Console(highlight=False)
    print_words(console, title, "bold")
    print_origin(console, found)
    for note in scaling_notes(found):
        print_words(console, note, "yellow")
    for regime, meaning in WORDS.items():
        print_plans(console, f"{regime} scaling: {meaning}", *scaling_table(found[regime]))
    console.print()
    for words in COLUMN_WORDS:
        print_words(console, words)
    if report is not None:
        console.print(f"written    {report}", soft_wrap=True)
