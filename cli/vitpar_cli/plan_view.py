"""Text output of `vitpar plan`: ranks, stages, batch and communication; words on plans for other commands too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from vitpar.models import ModelConfig
from vitpar.models.description import layer_of
from vitpar.planner.cost.pipeline import idle_share
from vitpar.planner.describe import Summary
from vitpar.runs.pages.maps import layer_words
from vitpar.strategy import Plan, Strategy, batch_arithmetic, rank_of_place
from vitpar_cli.outputs import data_table, facts_table
from vitpar_cli.rank_grid import draw_ranks, row_name

NAME_WIDTH = 20
"""Maximum columns of the names on the left."""
Row = tuple[str, str]
"""Name and sentence."""


def show(config: ModelConfig, plan: Plan, summary: Summary, state: str) -> None:
    """Print the summary of a plan.

    state: content of the memory column, in words.
    """
    console = Console(highlight=False)
    console.print(f"[bold]{config.name}[/] under [bold]{plan}[/]")
    ranks = f"{plan.world_size:,} rank{'s' * (plan.world_size > 1)}"
    size = f"{millions(summary['parameters'])} parameters, {config.words[1]}"
    console.print(f"{size}, {ranks}, {summary['precision']}\n")
    console.print(draw_ranks(plan, console.width), no_wrap=True)
    console.print()
    console.print(_stages(plan, summary))
    shards = any(part["shards"] for part in summary["strategies"])
    gathered = ", gathered parameters, gradients not yet reduced" * shards
    console.print(f"[dim]per rank; memory: {state}; not counted: activations{gathered}[/]\n")
    sections = list(_sections(config, plan, summary))
    width = min(NAME_WIDTH, max(len(name) for _, rows in sections for name, _ in rows))
    for heading, rows in sections:
        if heading:
            console.print(Text(f"\n{heading}", "bold"))
        console.print(facts_table(rows, width))
    if "modules" in summary:
        _show_modules(console, summary["modules"])


def _show_modules(console: Console, layers: Sequence[Summary]) -> None:
    """Print how tensor parallelism splits the modules of each kind of layer."""
    if not layers:
        console.print("\nno layer has tensor parallelism, so all modules are complete on every rank")
    for layer in layers:
        console.print(Text(f"\nmodules of {layer_words(layer['layers'])}: {layer['strategy']}", "bold"))
        table = data_table("module", "style", "weight", "bias")
        table.padding = (0, 1, 0, 0)
        for heading in ("before", "after"):  # words that must not break, but leave room for names if there are none
            sent = any(row[heading] for row in layer["modules"])
            table.add_column(heading, min_width=len("reduce-scatter") if sent else None)
        for row in layer["modules"]:
            placements = (words.replace(", ", "\n") for words in (row["weight"], row["bias"]))  # a line for each axis
            table.add_row(row["module"], row["style"], *placements, row["before"], row["after"])
        console.print(table)
    if layers:
        console.print("[dim]before and after: collectives around the product, in forward / in backward[/]")


def _stages(plan: Plan, summary: Summary) -> Table:
    """Return the table of stages, with a row for every position on the pp axis, as in the rank grid."""
    numbered = not plan.is_uniform and plan.pipeline_degree > 1
    offloads = any(part["host_bytes"] for part in summary["pipeline"])
    texts = ("", *["ranks"] * numbered, "layers")
    table = data_table(*texts, numbers=("FLOPs", "parameters", *["on host"] * offloads, "memory"))
    for column in table.columns[: len(texts) - 1]:
        column.no_wrap = True
    for part in summary["pipeline"]:
        first = rank_of_place(plan, part["pp"], 0)
        last = first + plan.stage_size - 1
        table.add_row(
            row_name(plan, part["pp"]),
            *([f"{first}-{last}" if last > first else str(first)] if numbered else []),
            layer_words([name for stage in part["layers"] for name in stage]),
            percent(part["flops_share"]),
            millions(part["parameters"]),
            *([decimal(part["host_bytes"])] if offloads else []),
            decimal(part["state_bytes"] - part["host_bytes"]),
        )
    return table


def _sections(config: ModelConfig, plan: Plan, summary: Summary) -> Iterator[tuple[str, list[Row]]]:
    """Yield the headings and rows of the sections below the table of stages."""
    first = batch_rows(plan, summary["batch"]["global_batch"], config.sample)
    pipeline = []
    if axis := summary["pipeline_axis"]:
        words = axis["communication"]
        if not plan.is_uniform:
            least, most = (percent(pick(summary["travel"])) for pick in (min, max))
            words += f"; a rank sends {least if least == most else f'{least} to {most}'} of each"
        pipeline = [(f"pp{plan.pp}", words)]
    sharing = []
    for one in summary["shared"]:
        layers = layer_words([layer_of(name) for name in one["copies"]])
        sharing.append((one["owner"], f"also in {layers}: {one['communication']}"))
    parts = summary["strategies"]
    if plan.is_uniform:
        yield "", [*first, *pipeline, *_communication(plan.strategy, parts[0])]
    else:
        yield "", first + pipeline
        strategies = {str(strategy): strategy for strategy in plan.distinct}
        for part in parts:
            heading = f"{layer_words(part['layers'])}: {part['strategy']}"
            yield heading, _communication(strategies[part["strategy"]], part) or [("", "no communication")]
    changes: dict[str, list[str]] = {}
    for change in summary["redistributions"]:
        shares = {"activation": change["forward"], "gradient": change["backward"]}
        some = ", ".join(f"{percent(share)} of each {what}" for what, share in shares.items() if share)
        none = "".join(f", nothing of {what}s" for what, share in shares.items() if not share)
        received = f"a rank receives up to {some}{none}" if some else "no communication, ranks already have their parts"
        words = f"{change['source']} -> {change['target']}: {received}"
        changes.setdefault(words, []).append(change["layer"])
    if changes:
        rows = [(layer_words(layers), words) for words, layers in changes.items()]
        yield "redistribution before", rows
    if sharing:
        yield "shared parameters", sharing


def _communication(strategy: Strategy, part: Summary) -> list[Row]:
    """Return the rows of each axis of a strategy, several if tp is arranged as a square or cube, and of its flags."""
    left, rows = iter(part["axes"]), list[Row]()
    for axis in strategy.axes:
        shape = strategy.tensor_shape if axis.role == "tp" else ((axis.role, axis.size),)
        names = [f"{name}{size}" for name, size in shape]
        rows += [(str(axis), f"arranged as {' x '.join(names)}")] if len(names) > 1 else []
        rows += [(f"{one['axis']}{one['degree']}", one["communication"]) for _, one in zip(names, left, strict=False)]
    return rows + [(flag["flag"], flag["effect"]) for flag in part["flags"]]


def batch_rows(plan: Plan, batch_size: int, sample: str) -> list[Row]:
    """Return the rows of a batch under a plan, and of the time for which its pipeline is idle in theory, if it has one.

    The batch is such as `256 images = 2 data-parallel parts x 128, each 4 micro-batches x 32`, without divisions by 1.

    sample: word for a sample (``ModelConfig.sample``).
    """
    batch = batch_arithmetic(plan, batch_size)
    words = f"{batch.global_batch:,} {sample}s"
    if batch.data_parallel > 1:
        words += f" = {batch.data_parallel} data-parallel parts x {batch.local_batch:,}"
    if batch.microbatches > 1:
        divided = ", each" if batch.data_parallel > 1 else " ="
        words += f"{divided} {batch.microbatches} micro-batches x {batch.microbatch_size:,}"
    if plan.pipeline_degree == 1:
        return [("batch", words)]
    idle = percent(idle_share(plan, batch.microbatches))
    return [("batch", words), ("pipeline", f"{plan.schedule}, in theory {idle} of the time idle")]


def millions(number: int) -> str:
    """Return a number in millions, such as `0.90 M` or `86.6 M`."""
    return f"{number / 1e6:,.{2 if number < 10e6 else 1}f} M"


def percent(share: float) -> str:
    """Return a fraction as a percentage: 0.912 becomes `91.2 %`."""
    return f"{share * 100:.1f} %"
