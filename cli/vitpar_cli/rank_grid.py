"""The rank grid: which rank stands where in the mesh, drawn with characters.

             dp 0         dp 1
          tp 0  tp 1   tp 0  tp 1
        ┌────────────┬────────────┐
stage 0 │  0     2   │  1     3   │      a row is a place on the pp axis
        ├────────────┼────────────┤      a box works on one part of the batch
stage 1 │  4     6   │  5     7   │      the ranks of a box split each layer
        └────────────┴────────────┘
"""

from __future__ import annotations

from collections import defaultdict
from itertools import product

from rich.text import Text

from vitpar.strategy import Plan, Role, coordinates, rank_grid, stages_of_rank

MOST_RANKS = 64
MOST_LINES = 32
COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")  # of the parts of the batch, in turn


def draw_ranks(plan: Plan, width: int) -> Text:
    """The grid in at most `width` columns; the groups along every axis where it would be too large to read."""
    if plan.world_size == 1:
        return Text("rank 0 holds the whole model and sees the whole batch")
    if plan.world_size <= MOST_RANKS:
        # Data-parallel parts stand side by side, or below each other where that is too wide.
        choices: tuple[tuple[Role, ...], ...] = (("pp",), ("pp", "dp"), ("pp", "dp", "fsdp"))
        for down in choices:
            lines = _grid(plan, down)
            if max(line.cell_len for line in lines) <= width and len(lines) <= MOST_LINES:
                return Text("\n").join(lines)
    return Text("\n").join(Text(line) for line in _groups(plan, width))


def row_name(plan: Plan, pp: int) -> str:
    """What a place on the pp axis is called: by the stages there, or as all layers where nothing is cut."""
    if plan.pipeline_degree == 1:
        return "all layers"
    stages = stages_of_rank(pp, plan)
    return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"


def _grid(plan: Plan, down: tuple[Role, ...]) -> list[Text]:
    """The lines of the picture. down: the axes whose ranks stand below each other, the others' stand side by side."""
    degree: dict[Role, int] = {"pp": plan.pipeline_degree}
    data: tuple[Role, ...] = ("dp", "fsdp")
    degree |= {role: plan.strategy.degree(role) for role in (*data, "tp")}
    ranks = {tuple(place[role] for role in degree): rank for rank, place in enumerate(rank_grid(plan))}
    across = [role for role in data if role not in down]
    rows = [dict(zip(down, index, strict=True)) for index in product(*(range(degree[role]) for role in down))]
    boxes = [dict(zip(across, index, strict=True)) for index in product(*(range(degree[role]) for role in across))]

    def label(place: dict[Role, int]) -> str:
        return ", ".join(f"{role} {place[role]}" for role in place if role != "pp" and degree[role] > 1)

    names = [f"{row_name(plan, row['pp'])}  {label(row)}".strip() if plan.pp != 1 else label(row) for row in rows]
    heads = [f"tp {index}" if degree["tp"] > 1 else "" for index in range(degree["tp"])]
    cell = max(len(heads[-1]), len(str(plan.world_size - 1)))
    inside = max(len(heads) * (cell + 2), *(len(label(box)) + 2 for box in boxes))
    margin = " " * max(map(len, names))

    def line(left: str, between: str, right: str) -> Text:
        return Text(f"{margin} {left}{between.join(['─' * inside] * len(boxes))}{right}", "dim")

    lines = [Text(f"{margin}  {' '.join(label(box).center(inside) for box in boxes)}")]
    if degree["tp"] > 1:
        head = "".join(f" {text:^{cell}} " for text in heads).center(inside)
        lines.append(Text(f"{margin}  {' '.join([head] * len(boxes))}", "dim"))
    if not lines[0].plain.strip():
        lines.pop(0)
    lines.append(line("┌", "┬", "┐"))
    for number, (row, name) in enumerate(zip(rows, names, strict=True)):
        if number and row["pp"] != rows[number - 1]["pp"]:
            lines.append(line("├", "┼", "┤"))
        text = Text(f"{name:<{len(margin)}} ").append("│", "dim")
        for box in boxes:
            place = row | box
            colour = COLOURS[(place["dp"] * degree["fsdp"] + place["fsdp"]) % len(COLOURS)]
            here = (ranks[place["pp"], place["dp"], place["fsdp"], tp] for tp in range(degree["tp"]))
            text.append("".join(f" {rank:^{cell}} " for rank in here).center(inside), colour).append("│", "dim")
        lines.append(text)
    lines.append(line("└", "┴", "┘"))
    for text in lines:
        text.rstrip()
    return lines


def _groups(plan: Plan, width: int) -> list[str]:
    """A line for each axis: its groups of ranks, as many as fit."""
    lines = []
    for axis in plan.axes:
        members: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for rank in range(plan.world_size):
            place = coordinates(plan, rank)
            members[tuple(index for role, index in place.items() if role != axis.role)].append(rank)
        line = f"{axis.role + ':':<6}"
        for number, group in enumerate(members.values()):
            piece = (" | " if number else "") + _short(group)
            if len(line) + len(piece) > width - len(" | …") and number:
                line += " | …"
                break
            line += piece
        lines.append(line)
    return lines


def _short(ranks: list[int]) -> str:
    """`0 1 2 3`, `0 8 … 56`."""
    return " ".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]} {ranks[1]} … {ranks[-1]}"
