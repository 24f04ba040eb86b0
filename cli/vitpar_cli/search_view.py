"""Text output of `vitpar search`, and the table of plans that other commands share."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import typer
from rich.console import Console
from rich.markup import escape

from vitpar.terminal import is_terminal
from vitpar.text import count, either, size
from vitpar_cli.outputs import ProgressLines, print_words

if TYPE_CHECKING:
    from vitpar.planner.comparison import Compared
    from vitpar.planner.cost.layer import LayerCosts
    from vitpar.planner.cost.price import Price
    from vitpar.planner.report.data import Findings, Prediction, Provenance
    from vitpar.planner.search.gains import Gain
    from vitpar.planner.training_time import TrainingTime

SHOWN = 5
"""Number of plans that are listed after the best one."""


class SearchProgress:
    """Progress of a search on stderr: a live line on a terminal, otherwise an occasional plain line.

    shown: whether to show the live line.
    """

    def __init__(self, shown: bool) -> None:
        console = Console(stderr=True)
        live = is_terminal(sys.stderr)
        self._status = console.status("searching …") if shown and live else None
        self._lines = None if live else ProgressLines(eager=False)
        self.about = ""  # the row of a table that is searched for, shown instead of the numbers of plans

    def __enter__(self) -> Self:
        if self._status:
            self._status.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._status:
            self._status.stop()

    def __call__(self, done: int, total: int, best: "Price | None") -> None:
        best_so_far = f", best so far {best.images_per_second:,.0f} samples/s" if best else ""
        line = self.about or f"{done} of {total} kinds of plans{best_so_far}"
        if self._status:
            self._status.update(line)
        elif self._lines:
            self._lines(line)


def show(
    findings: "Findings",
    batch_sizes: "Sequence[Compared]",
    out: Path | None,
    report: Path | None = None,
    trace: Path | None = None,
) -> None:
    """Print the best plan, its costs, what would help, other plans, why obvious ones are worse, and the files written.

    batch_sizes: the best plan for each batch size; empty for a single one.
    """
    from vitpar.planner.report.data import noise_words

    console = Console(highlight=False)
    _show_best(console, findings)
    _show_gains(console, findings.gains, findings.result.plans[0])
    _print_comparison(console, "best plan for each batch size", batch_sizes)
    _print_prices(console, "next best", findings.result.plans[1 : 1 + SHOWN], findings)
    _print_prices(console, "with less memory", findings.frontier[1:], findings)
    _show_reasons(console, findings)
    if findings.doubt:
        console.print()
        print_words(console, noise_words(findings.doubt), indent=0)
    console.print(f"\ntrain      {findings.train}", markup=False, soft_wrap=True)
    for path in (out, report, trace):
        if path is not None:
            console.print(f"written    {path}", soft_wrap=True)


def show_comparison(rows: "Sequence[Compared]", origin: "Provenance", as_json: bool) -> None:
    """Print the best plan of each combination, as a table for each model and image size or as JSON."""
    from vitpar.planner.report.comparison import comparison_notes, comparison_to_json

    notes = comparison_notes(rows)
    if as_json:
        about = {"vitpar": origin.version, "command": origin.command, "notes": notes}
        typer.echo(json.dumps(about | {"rows": comparison_to_json(rows)}))
        return
    console = Console(highlight=False)
    print_origin(console, origin)
    for note in notes:
        print_words(console, note, "yellow")
    for setup in dict.fromkeys(row.combination.setup for row in rows):
        _print_comparison(console, setup, [row for row in rows if row.combination.setup == setup])


def _print_comparison(console: Console, title: str, rows: "Sequence[Compared]") -> None:
    """Print a table of the best plans of combinations."""
    from vitpar.planner.report.comparison import comparison_table

    print_plans(console, title, *comparison_table(rows))


def _show_gains(console: Console, gains: "Sequence[Gain]", best: "Price") -> None:
    """Print how much each change of the machine or the batch would help."""
    from vitpar.planner.report.data import gain_table

    print_plans(console, "what would help", *gain_table(gains, best))


def show_choice(findings: "Findings") -> None:
    """Print the best plan, its costs and why obvious plans are worse, before a training run uses the plan."""
    console = Console(highlight=False)
    _show_best(console, findings)
    _show_reasons(console, findings)
    console.print()


def show_prediction(prediction: "Prediction", origin: "Provenance") -> None:
    """Print the predicted speed, time and memory of a plan, and whether it fits into memory."""
    from vitpar.planner.remedies import less_memory
    from vitpar.planner.report.data import assumptions, provenance, speed_words
    from vitpar.planner.report.uncertainty import uncertainty

    console = Console(highlight=False)
    price, costs, doubt = prediction.price, prediction.costs, uncertainty(prediction.price, prediction.costs)
    console.print()
    print_words(console, f"predicted for {model_words(costs, count(price.plan.world_size, 'rank'))}", "bold")
    print_origin(console, origin)
    notes = (*provenance(costs.hardware, costs.model), *assumptions(prediction.training))
    over = price.memory_bytes - prediction.budget
    fullest = max(price.memory, key=lambda memory: memory.total)
    ways = less_memory(fullest, costs.config, price.plan, price.batch_size, costs.model.precision)
    fits = "yes" if prediction.fits else f"no: {size(over)} too much; use {either(ways)}"
    rows = [("speed", speed_words(price, costs)), *_training_rows(prediction.training, costs)]
    print_rows(console, [*rows, *cost_rows(price, prediction.budget), ("fits", fits)])
    for note in (*notes, *([doubt.source] if doubt else [])):
        print_words(console, note, "yellow")
    _show_gains(console, prediction.gains, price)


def _show_best(console: Console, findings: "Findings") -> None:
    """Print the best plan, the source of its figures, and its costs."""
    from vitpar.planner.report.data import assumptions, speed_words

    best, costs, doubt = findings.result.plans[0], findings.costs, findings.doubt
    console.print(f"[bold]{best.plan}[/bold]", soft_wrap=True)
    print_words(console, model_words(costs, count(best.plan.world_size, "rank")))
    print_origin(console, findings.origin)
    pipeline = ""
    if best.plan.pipeline_degree > 1:
        blocks = "" if isinstance(best.plan.split, str) else f", blocks per stage {','.join(map(str, best.plan.split))}"
        pipeline = f", {best.plan.schedule}{blocks}"
    rows = [
        ("speed", speed_words(best, costs)),
        *_training_rows(findings.training, costs),
        ("plan", f"{count(best.plan.microbatches or 1, 'micro-batch')}{pipeline}"),
        *cost_rows(best, findings.budget),
        ("searched", _searched(findings)),
    ]
    print_rows(console, rows)
    for note in (*findings.notes, *assumptions(findings.training), *([doubt.source] if doubt else [])):
        print_words(console, note, "yellow")


def _training_rows(training: "TrainingTime | None", costs: "LayerCosts") -> list[tuple[str, str]]:
    """Return rows with the duration of the complete training, failures and cost; none if it is unknown."""
    from vitpar.planner.training_time import hours_name

    if training is None:
        return []
    hours = hours_name(costs.hardware)
    return [("training", training.words(hours)), *training.condition_rows(hours)]


def cost_rows(price: "Price", budget: float) -> list[tuple[str, str]]:
    """Return rows with the breakdown of a step's time and of the fullest rank's memory.

    budget: memory of a rank in bytes.
    """
    return [
        ("time", _parts(price)),
        ("memory", f"{size(price.memory_bytes)} of {size(budget)}: {_memory(price)}"),
    ]


def print_rows(console: Console, rows: Sequence[tuple[str, str]]) -> None:
    """Print rows of a name and a sentence."""
    for name, words in rows:
        print_words(console, f"{name:<10} {words}", indent=11)


def _show_reasons(console: Console, findings: "Findings") -> None:
    console.print("\nwhy not")
    for reason in findings.reasons:
        print_words(console, f"  {reason.plan:<14} {findings.why(reason)}", indent=17)


def _parts(price: "Price") -> str:
    """Return text such as `computing 98.9% (backward 65.2%, forward 33.7%), optimizer 1.2%`, largest first.

    Purposes and parts that take less than 1 % are left out.
    """
    from vitpar.planner.search.gains import PURPOSES, shares

    words = []
    for purpose, share in shares(price).items():
        parts = sorted(((price.time.get(name, 0.0) / price.seconds, name) for name in PURPOSES[purpose]), reverse=True)
        shown = [f"{name} {part:.1%}" for part, name in parts if part >= 0.01]
        if share >= 0.01:
            words.append(f"{purpose} {share:.1%}" + (f" ({', '.join(shown)})" if len(shown) > 1 else ""))
    return ", ".join(words)


def _memory(price: "Price") -> str:
    from vitpar.planner.cost.memory import PARTS

    fullest = max(price.memory, key=lambda memory: memory.total)
    parts = sorted(((getattr(fullest, name), name) for name in PARTS), reverse=True)
    return ", ".join(f"{name} {size(part)}" for part, name in parts if part >= 0.01 * fullest.total)


def _searched(findings: "Findings") -> str:
    from vitpar.planner.report.data import certainty

    result = findings.result
    looked = f"{result.seconds:.2f} s, {count(result.strategies, 'strategy')}, {count(result.priced, 'plan')} priced"
    return f"{looked}: {certainty(result)}"


def _print_prices(console: Console, title: str, prices: "Sequence[Price]", findings: "Findings") -> None:
    from vitpar.planner.cost.price import schedule_words
    from vitpar.planner.report.data import COLUMNS, figures

    best, doubt = findings.result.plans[0], findings.doubt
    rows = [(*figures(price, best, doubt), f"{price.plan}{schedule_words(price.plan)}") for price in prices]
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


def model_words(costs: "LayerCosts", ranks: str) -> str:
    """Return text such as `vit_huge_patch14_224 in bf16 on 8 ranks of NVIDIA H100 SXM 80GB`.

    ranks: number of ranks, in words.
    """
    compiled = ", compiled" if costs.model.compiled else ""
    return f"{costs.config.name} in {costs.model.precision}{compiled} on {ranks} of {costs.hardware.device_name}"


def print_origin(console: Console, origin: "Provenance") -> None:
    """Print the version of vitpar and the command that made the output."""
    console.print(str(origin), style="dim", markup=False, soft_wrap=True)
