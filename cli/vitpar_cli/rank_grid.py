"""Rank grid: a drawing with characters of the place of each rank in the mesh.

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
from itertools import product

from rich.text import Text

from vitpar.planner.describe import shown_axis
from vitpar.runs.pages.maps import MOST_RANKS, axis_groups
from vitpar.strategy import Plan, Strategy, place_of_rank, stages_of_rank
from vitpar.strategy.layout import mesh_axes, place

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
