"""What `vitpar search` shows of what it found."""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich import box
from rich.console import Console
from rich.table import Table

from vitpar.text import count, size

if TYPE_CHECKING:
    from vitpar.planner.cost.layer import LayerCosts
    from vitpar.planner.cost.price import Price
    from vitpar.planner.report.data import Findings

SHOWN = 5
"""Plans listed besides the best."""


class SearchProgress:
    """A line on stderr that says how far the search is."""

    def __init__(self, shown: bool) -> None:
        console = Console(stderr=True)
        self._status = console.status("searching …") if shown and console.is_terminal else None

    def __enter__(self) -> Self:
        if self._status:
            self._status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._status:
            self._status.stop()

    def __call__(self, done: int, total: int, best: "Price | None") -> None:
        if self._status:
            found = f", best so far {best.images_per_second:,.0f} images/s" if best else ""
            self._status.update(f"{done} of {total} kinds of plans{found}")


def show(
    found: "Findings", costs: "LayerCosts", out: Path | None, report: Path | None = None, trace: Path | None = None
) -> None:
    """Print the best plan, what it costs, the next best, why not the obvious ones, and what was written."""
    console = Console(highlight=False)
    result, best = found.result, found.result.plans[0]
    console.print(f"[bold]{best.plan}[/bold]", soft_wrap=True)
    console.print(f"{costs.config.name} on {count(best.plan.world_size, 'rank')} of {costs.hardware.device_name}")
    for note in found.notes:
        console.print(note, style="yellow", soft_wrap=True)
    pipeline = ""
    if best.plan.pipeline_degree > 1:
        blocks = "" if isinstance(best.plan.split, str) else f", blocks {','.join(map(str, best.plan.split))} of stages"
        pipeline = f", {best.plan.schedule}{blocks}"
    rows = [
        ("speed", f"{best.images_per_second:,.1f} images/s, {best.seconds * 1e3:,.1f} ms a step of {best.batch_size}"),
        ("plan", f"{count(best.plan.microbatches or 1, 'micro-batch')}{pipeline}"),
        ("time", _parts(best.time, best.seconds)),
        ("memory", f"{size(best.memory_bytes)} of {size(found.budget)}: {_memory(best)}"),
        ("precision", costs.model.precision),
        ("searched", _searched(found)),
    ]
    for name, words in rows:
        console.print(f"{name:<10} {words}", soft_wrap=True)
    if len(result.plans) > 1:
        console.print(_plans("next best", result.plans[1 : 1 + SHOWN], best))
    if len(found.frontier) > 1:
        console.print(_plans("with less memory", found.frontier[1:], best))
    console.print("\nwhy not")
    for reason in found.reasons:
        console.print(f"  {reason.plan:<14} {reason.why}", soft_wrap=True)
    if out is not None:
        console.print(f"\nwritten    {out}   (vitpar train --mesh {out})", soft_wrap=True)
    for path in (report, trace):
        if path is not None:
            console.print(f"written    {path}", soft_wrap=True)


def _parts(time: Mapping[str, float], seconds: float) -> str:
    """`backward 61.2 %, forward 30.1 %`: what takes a hundredth at least."""
    items = sorted(time.items(), key=lambda item: -item[1])
    return ", ".join(f"{what} {part / seconds:.1%}" for what, part in items if part >= 0.01 * seconds)


def _memory(price: "Price") -> str:
    from vitpar.planner.cost.memory import PARTS

    fullest = max(price.memory, key=lambda memory: memory.total)
    parts = sorted(((getattr(fullest, name), name) for name in PARTS), reverse=True)
    return ", ".join(f"{name} {size(part)}" for part, name in parts if part >= 0.01 * fullest.total)


def _searched(found: "Findings") -> str:
    from vitpar.planner.report.data import certainty

    result = found.result
    looked = f"{result.seconds:.2f} s, {count(result.strategies, 'strategy')}, {result.priced} plans priced"
    return f"{looked}: {certainty(result)}"


def _plans(title: str, prices: "tuple[Price, ...]", best: "Price") -> Table:
    from vitpar.planner.report.data import COLUMNS, figures, schedule_words

    table = Table("plan", box=box.SIMPLE, title=title, title_justify="left")
    for heading in COLUMNS:
        table.add_column(heading, justify="right")
    for price in prices:
        table.add_row(f"{price.plan}{schedule_words(price.plan)}", *figures(price, best))
    return table
