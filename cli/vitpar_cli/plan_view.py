"""Text output of `vitpar plan`: ranks, stages, batch and communication; words on plans for other commands too.

The rank grid is a drawing with characters of the place of each rank in the mesh:

             dp 0         dp 1
          tp 0  tp 1   tp 0  tp 1
        ┌────────────┬────────────┐
stage 0 │  0     2   │  1     3   │      a row is a position on the pp axis
        ├────────────┼────────────┤      a box is a tensor-parallel group: its ranks split each layer
stage 1 │  4     6   │  5     7   │      a colour is a data-parallel part of the batch
        └────────────┴────────────┘

With 2d and 2.5d tensor parallelism a box is a square of rows i and columns j, with 3d of rows j and columns k.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from vitpar.models import ModelConfig
from vitpar.models.description import layer_of
from vitpar.planner.cost.pipeline import idle_share
from vitpar.planner.describe import Summary, shown_axis
from vitpar.runs.pages.maps import MOST_RANKS, axis_groups, layer_words
from vitpar.strategy import Plan, Strategy, batch_arithmetic, place_of_rank, rank_of_place, stages_of_rank
from vitpar.strategy.layout import mesh_axes, place
from vitpar_cli.outputs import Row, data_table, facts_table

NAME_WIDTH = 20
"""Maximum columns of the names on the left."""


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


LAYERS_WIDTH = 24
"""Maximum columns of the names of layers."""
COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")
"""Colours of the parts of the batch, in turn."""
DATA_AXES = ("dp", "fsdp", "d", "i")
"""Axes that split the batch."""


def draw_ranks(plan: Plan, width: int) -> Text:
    """Draw the ranks of a plan in at most `width` columns.

    A uniform plan is drawn as a grid, or if that is too large to read, as the groups of ranks along each axis. A
    layerwise plan gets a line per strategy, with the ranks of a stage grouped by their part of the batch.
    """
    if plan.world_size == 1:
        return Text("rank 0 holds the complete model and batch")
    if not plan.is_uniform:
        return Text("\n").join(_strategies(plan, width))
    if plan.world_size <= MOST_RANKS:
        lines = _grid(plan)
        if max(line.cell_len for line in lines) <= width:
            return Text("\n").join(lines)
    arranged = [axis for axis, _ in plan.strategy.tensor_shape]
    names = [name for axis in plan.axes for name in (arranged if axis.role == "tp" else [axis.role])]
    starts = {name: f"{shown_axis(plan.strategy, name) + ':':<6}" for name in names}
    return Text("\n").join(
        _fitting(start, axis_groups(plan, plan.strategy, name), width) for name, start in starts.items()
    )


def row_name(plan: Plan, pp: int) -> str:
    """Return the label of position `pp` on the pp axis: its stages, or "all layers" without a pipeline."""
    if plan.pipeline_degree == 1:
        return "all layers"
    stages = stages_of_rank(pp, plan)
    return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"


def _grid(plan: Plan) -> list[Text]:
    """Return the lines of the grid."""
    strategy = plan.strategy
    # The axis of the rows and the axis of the columns inside a box, and those along which boxes are side by side.
    down, across = ("j", "k") if strategy.tensor_mode == "3d" else ("i", "j")
    sizes = {"pp": plan.pipeline_degree, down: 1, across: 1} | dict(mesh_axes(strategy))
    beside = [axis for axis in DATA_AXES if axis in sizes and axis != down]
    ranks = {}
    for rank in range(plan.world_size):
        pp, stage_rank = place_of_rank(plan, rank)
        at = {"pp": pp, **place(strategy, stage_rank)}
        ranks[tuple(at.get(axis, 0) for axis in sizes)] = rank

    def label(at: dict[str, int]) -> str:
        return ", ".join(f"{shown_axis(strategy, axis)} {at[axis]}" for axis in at if sizes[axis] > 1)

    boxes = [dict(zip(beside, index, strict=True)) for index in product(*(range(sizes[axis]) for axis in beside))]
    heads = [label({across: number}) for number in range(sizes[across])]
    cell = max(len(heads[-1]), len(str(plan.world_size - 1)))
    inside = max(len(heads) * (cell + 2), *(len(label(box)) + 2 for box in boxes))
    rows = list(product(range(sizes["pp"]), range(sizes[down])))
    stages = [f"{row_name(plan, pp)}  " if sizes["pp"] > 1 else "" for pp in range(sizes["pp"])]
    widest = max(map(len, stages))
    names = [f"{'' if row else stages[pp]:<{widest}}{label({down: row})}".rstrip() for pp, row in rows]
    margin = max(map(len, names))

    def line(left: str, between: str, right: str) -> Text:
        return Text(f"{'':<{margin}} {left}{between.join(['─' * inside] * len(boxes))}{right}", "dim")

    lines = []
    if any(map(label, boxes)):
        lines.append(Text(f"{'':<{margin}}  {' '.join(label(box).center(inside) for box in boxes)}"))
    if sizes[across] > 1:
        head = "".join(f" {text:^{cell}} " for text in heads).center(inside)
        lines.append(Text(f"{'':<{margin}}  {' '.join([head] * len(boxes))}", "dim"))
    lines.append(line("┌", "┬", "┐"))
    for (pp, row), name in zip(rows, names, strict=True):
        if pp and not row:
            lines.append(line("├", "┼", "┤"))
        text = Text(f"{name:<{margin}} ").append("│", "dim")
        for box in boxes:
            at = {"pp": pp, down: row} | box
            part = 0  # of the batch, numbered along the axes that split it
            for axis in DATA_AXES:
                part = part * sizes[axis] + at[axis] if axis in at else part
            here = (ranks[tuple((at | {across: column})[axis] for axis in sizes)] for column in range(sizes[across]))
            words = "".join(f" {rank:^{cell}} " for rank in here).center(inside)
            text.append(words, COLOURS[part % len(COLOURS)]).append("│", "dim")
        lines.append(text)
    lines.append(line("└", "┴", "┘"))
    for text in lines:
        text.rstrip()
    return lines


def _strategies(plan: Plan, width: int) -> list[Text]:
    """Return the lines of a layerwise plan: a heading, and a line or two for each strategy."""
    layers: dict[Strategy, list[str]] = {}
    for selector, strategy in plan.layers:
        layers.setdefault(strategy, []).append(selector)
    names = {strategy: _cut(", ".join(selectors), LAYERS_WIDTH) for strategy, selectors in layers.items()}
    name, kind = (max(map(len, column)) for column in (names.values(), map(str, layers)))
    counted = "ranks of a stage, counted from 0" if plan.pipeline_degree > 1 else "ranks"
    lines = [Text(_cut(f"{counted}; | separates parts of the batch", width), "dim")]
    for strategy, selectors in names.items():
        parts: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for rank in range(strategy.size):
            at = place(strategy, rank)
            parts[tuple(at.get(axis, 0) for axis in DATA_AXES)].append(rank)
        start = f"{selectors:<{name}}  {strategy!s:<{kind}}  "
        if len(start) > width // 2:  # the ranks go on a separate line
            lines.append(Text(_cut(start.rstrip(), width)))
            start = "  "
        lines.append(_fitting(start, list(parts.values()), width, coloured=True))
    return lines


def _fitting(start: str, groups: list[list[int]], width: int, *, coloured: bool = False) -> Text:
    """Return `start` followed by as many of `groups` as fit in `width` columns, with an ellipsis if some do not."""
    line = Text(start)
    for number, group in enumerate(groups):
        piece = " ".join(map(str, group)) if len(group) <= 4 else f"{group[0]} {group[1]} … {group[-1]}"
        after = " | …" if number + 1 < len(groups) else ""
        if number and len(line) + len(f" | {piece}{after}") > width:
            return line.append(" | …", "dim")
        line.append(" | " if number else "", "dim").append(piece, COLOURS[number % len(COLOURS)] if coloured else "")
    return line


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
