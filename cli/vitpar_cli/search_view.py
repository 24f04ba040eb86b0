"""Text output of `vitpar search`, and the table of plans that other commands share."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from vitpar.planner.cost.memory import PARTS
from vitpar.planner.cost.price import Price, schedule_words
from vitpar.planner.report.data import (
    COLUMNS,
    certainty,
    figures,
    gain_table,
    noise_words,
    plan_of,
    remarks,
    speed_words,
    why_words,
)
from vitpar.planner.report.tables import comparison_notes, comparison_table
from vitpar.planner.search.gains import PURPOSES
from vitpar.planner.training_time import hours_name, training_rows
from vitpar.text import count, either, size
from vitpar_cli.outputs import Row, Status, origin, origin_words, print_json, print_rows, print_words

Record = Mapping[str, Any]
"""A result, or a part of one, as JSON."""
SHOWN = 5
"""Number of plans that are listed after the best one."""


class SearchProgress(Status):
    """Progress of a search on stderr."""

    about = ""
    """Row of a table that is searched for, shown instead of the numbers of plans."""

    def __call__(self, done: int, total: int, best: Price | None) -> None:
        best_so_far = f", best so far {best.images_per_second:,.0f} samples/s" if best else ""
        self.tell(self.about or f"{done} of {total} kinds of plans{best_so_far}")


def show(found: Record, written: Sequence[Path | None]) -> None:
    """Print the best plan, its costs, why obvious ones are worse, what would help, other plans, and the files written.

    found: result of ``vitpar.planner.report.data.search_record``.
    """
    console, plans = Console(highlight=False), found["plans"]
    show_choice(console, found)
    print_plans(console, "what would help", *gain_table(found["what_would_help"], plans[0]))
    rows = found["batch_sizes"]
    print_plans(console, "best plan for each batch size", *comparison_table(rows, hours_name(found["device_type"])))
    _print_prices(console, "next best", plans[1 : 1 + SHOWN], plans[0])
    _print_prices(console, "with less memory", found["frontier"][1:], plans[0])
    if noise := noise_words(plans[0]):
        console.print()
        print_words(console, noise, indent=0)
    console.print(f"\ntrain      {found['train']}", markup=False, soft_wrap=True)
    for path in filter(None, written):
        console.print(f"written    {path}", soft_wrap=True)


def show_comparison(rows: Sequence[Record], as_json: bool) -> None:
    """Print the best plan of each combination, as a table for each model and image size or as JSON."""
    notes = comparison_notes(rows)
    if as_json:
        print_json(origin() | {"notes": notes, "rows": rows})
        return
    console, setups = Console(highlight=False), dict[str, list[Record]]()
    print_origin(console, origin())
    for note in notes:
        print_words(console, note, "yellow")
    for row in rows:
        setups.setdefault(f"{row['model']}, {row['image_size']} pixels", []).append(row)
    for setup, mine in setups.items():
        print_plans(console, setup, *comparison_table(mine, "GPU-hours"))


def show_prediction(found: Record) -> None:
    """Print the predicted speed, time and memory of a plan, and whether it fits into memory."""
    console, plan, budget = Console(highlight=False), plan_of(found), found["memory_budget_bytes"]
    console.print()
    print_words(console, f"predicted for {model_words(found, count(plan.world_size, 'rank'))}", "bold")
    fits = "yes"
    if not found["fits"]:
        fits = f"no: {size(found['memory_bytes'] - budget)} too much; use {either(found['less_memory'])}"
    _print_figures(console, found, found, [], [("fits", fits)])
    print_plans(console, "what would help", *gain_table(found["what_would_help"], found))


def show_choice(console: Console, found: Record) -> None:
    """Print the best plan, the source of its figures, its costs, and why obvious plans are worse."""
    best, looked = found["plans"][0], found["looked_at"]
    plan = plan_of(best)
    console.print(f"[bold]{plan}[/bold]", soft_wrap=True)
    print_words(console, model_words(found, count(plan.world_size, "rank")))
    pipeline = ""
    if plan.pipeline_degree > 1:
        blocks = "" if isinstance(plan.split, str) else f", blocks per stage {','.join(map(str, plan.split))}"
        pipeline = f", {plan.schedule}{blocks}"
    how = f"{count(looked['strategies'], 'strategy')}, {count(looked['priced'], 'plan')} priced"
    searched = f"{found['search_seconds']:.2f} s, {how}: {certainty(found)}"
    about = [("plan", f"{count(plan.microbatches or 1, 'micro-batch')}{pipeline}")]
    _print_figures(console, found, best, about, [("searched", searched)])
    console.print("\nwhy not")
    for reason in found["why_not"]:
        print_words(console, f"  {reason['strategy']:<14} {why_words(reason, found)}", indent=17)


def _print_figures(console: Console, found: Record, record: Record, about: Sequence[Row], last: Sequence[Row]) -> None:
    """Print the origin of a result, the speed, time and memory of one of its plans, and notes on these figures.

    about, last: rows before those of a step's time and memory, and behind them.
    """
    print_origin(console, found)
    memory = f"{size(record['memory_bytes'])} of {size(found['memory_budget_bytes'])}: {_memory(record)}"
    length = training_rows(found["training"], hours_name(found["device_type"]))
    rows = [("speed", speed_words(record)), *length, *about, ("time", _parts(record)), ("memory", memory), *last]
    print_rows(console, rows)
    for note in remarks(found["notes"], found["training"], record):
        print_words(console, note, "yellow")


def _parts(record: Record) -> str:
    """Return text such as `computing 98.9% (backward 65.2%, forward 33.7%), optimizer 1.2%`, largest first.

    Purposes and parts that take less than 1 % are left out.
    """
    words, time = [], record["step_breakdown_seconds"]
    for purpose, share in record["step_shares"].items():
        parts = sorted(
            ((time.get(name, 0.0) / record["step_seconds"], name) for name in PURPOSES[purpose]), reverse=True
        )
        shown = [f"{name} {part:.1%}" for part, name in parts if part >= 0.01]
        if share >= 0.01:
            words.append(f"{purpose} {share:.1%}" + (f" ({', '.join(shown)})" if len(shown) > 1 else ""))
    return ", ".join(words)


def _memory(record: Record) -> str:
    fullest = max(record["memory_breakdown_bytes"], key=lambda memory: memory["total"])
    parts = sorted(((fullest[name], name) for name in PARTS), reverse=True)
    return ", ".join(f"{name} {size(part)}" for part, name in parts if part >= 0.01 * fullest["total"])


def _print_prices(console: Console, title: str, records: Sequence[Record], best: Record) -> None:
    rows = [(*figures(one, best), f"{one['strategy']}{schedule_words(plan_of(one))}") for one in records]
    print_plans(console, title, COLUMNS, rows)


def print_plans(
    console: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], last: str = "plan"
) -> None:
    """Print a table whose last column is a plan; print nothing without rows.

    A plan that is too long for its line is printed on a separate line below, so that it can be copied.

    headings: headings of all columns but the last.
    last: that of the last one.
    """
    if not rows:
        return
    widths = [max(map(len, column)) for column in zip(headings, *(row[:-1] for row in rows), strict=True)]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))

    console.print(f"\n{escape(title)}\n  [dim]{escape(line(headings))}  {last}[/dim]", soft_wrap=True)
    for *cells, plan in rows:
        start = f"  {line(cells)}"
        below = len(start) + 2 + len(plan) > console.width
        console.print(f"{start}\n      {plan}" if below else f"{start}  {plan}", markup=False, soft_wrap=True)


def model_words(found: Record, ranks: str) -> str:
    """Return text such as `vit_huge_patch14_224 in bf16 on 8 ranks of NVIDIA H100 SXM 80GB`.

    found: has the fields of ``vitpar.planner.report.data.origin_to_json``.
    ranks: number of ranks, in words.
    """
    compiled = ", compiled" if found["compiled"] else ""
    return f"{found['model']} in {found['precision']}{compiled} on {ranks} of {found['device']}"


def print_origin(console: Console, found: Record) -> None:
    """Print the version of vitpar and the command that made a result."""
    console.print(origin_words(found), style="dim", markup=False, soft_wrap=True)
