"""HTML tables of a plan's placement: layers on stages and ranks, ranks on mesh axes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

from vitpar.models.config import ModelConfig
from vitpar.models.description import block_index, is_block
from vitpar.runs.pages.document import table
from vitpar.strategy import Plan, Strategy, place_of_rank, stage_layers, stages_of_rank
from vitpar.strategy.layout import mesh_axes, place
from vitpar.text import ranks

MOST_RANKS = 64
"""Maximum number of ranks shown as a grid; with more, the groups along each axis are listed."""
AXES = {"j": "tp", "i": "tp i", "k": "tp k", "d": "tp d"}
"""Displayed names of tensor axes."""


def placement(plan: Plan, config: ModelConfig | None) -> str:
    """Return where ranks and layers are; empty if that says no more than the plan's name.

    config: configuration of the model; None leaves the layers out.
    """
    axes = max(sum(size > 1 for _, size in mesh_axes(strategy)) for strategy in plan.distinct)
    parts = ["<h3>Ranks on each axis</h3>", rank_grid(plan)] if axes + (plan.pipeline_degree > 1) > 1 else []
    if config is not None and (plan.pipeline_degree > 1 or len(plan.distinct) > 1):
        parts += ["<h3>Layers and ranks</h3>", layer_map(config, plan)]
    return "".join(parts)


def layer_map(config: ModelConfig, plan: Plan) -> str:
    """Return a table of the layers of every stage, their strategies, and the ranks that hold them."""
    strategies, places = plan.strategies(config.layer_names), range(plan.pipeline_degree)
    held = {stage: pp for pp in places for stage in stages_of_rank(pp, plan)}
    rows = []
    for stage, names in enumerate(stage_layers(config, plan)):
        members = [r for r in range(plan.world_size) if place_of_rank(plan, r)[0] == held[stage]]
        for strategy, run in groupby(names, key=lambda name: strategies[name]):
            layers = list(run)
            where = [str(stage), _listed(members)] if plan.pipeline_degree > 1 else [_listed(members)]
            groups = dict.fromkeys(group for name in layers if (group := config.layers[name].group))
            rows.append([*where, layer_words(layers, groups), f"<code>{escape(str(strategy))}</code>"])
    heads = ["stage", "ranks", "layers", "strategy"][plan.pipeline_degree == 1 :]
    return table(heads, rows, slice(0, 0))


def rank_grid(plan: Plan) -> str:
    """Return grids of the ranks with their index on each axis, one grid for each distinct placement of a strategy."""
    grids: dict[str, list[str]] = {}
    for strategy in plan.distinct:
        grids.setdefault(_grid(plan, strategy), []).append(f"<code>{escape(str(strategy))}</code>")
    if len(grids) == 1:
        return next(iter(grids))
    return "".join(f"<p>Layers under {', '.join(names)}</p>{grid}" for grid, names in grids.items())


def _grid(plan: Plan, strategy: Strategy) -> str:
    """Return a grid with a row for each index on the pp axis and a cell for each of its ranks."""
    names = [axis for axis, size in mesh_axes(strategy) if size > 1]
    if plan.world_size > MOST_RANKS:
        return "<p>" + "; ".join(_groups(plan, strategy, axis) for axis in names) + "</p>"
    rows = []
    for pp in range(plan.pipeline_degree):
        cells = []
        for rank in range(plan.world_size):
            at, stage_rank = place_of_rank(plan, rank)
            if at == pp:
                index = place(strategy, stage_rank)
                label = " ".join(f"{AXES.get(axis, axis)} {index[axis]}" for axis in names)
                cells.append(f"<td><b>{rank}</b><br><small>{label}</small></td>")
        head = f"<th>pp {pp}</th>" if plan.pipeline_degree > 1 else ""
        step = 16  # cells per line
        for start in range(0, len(cells), step):
            rows.append(f"<tr>{head}{''.join(cells[start : start + step])}</tr>")
    return f'<div class="scroll"><table class="ranks">{"".join(rows)}</table></div>'


def axis_groups(plan: Plan, strategy: Strategy, axis: str) -> list[list[int]]:
    """Return the groups of ranks along an axis of a layer's mesh, or along pp."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(plan.world_size):
        pp, stage_rank = place_of_rank(plan, rank)
        at = {"pp": pp, **place(strategy, stage_rank)}
        groups.setdefault(tuple(index for name, index in at.items() if name != axis), []).append(rank)
    return list(groups.values())


def _groups(plan: Plan, strategy: Strategy, axis: str) -> str:
    """Return the first groups of ranks along an axis, as in `tp: 0-3 | 4-7 | …`."""
    groups = axis_groups(plan, strategy, axis)
    return f"{AXES.get(axis, axis)}: {' | '.join(map(_listed, groups[:4]))}{' | …' * (len(groups) > 4)}"


def _listed(members: Sequence[int]) -> str:
    """Return the ranks in short, as in `0-3` or `0, 2, 4 … 14`."""
    if len(members) > 8 and members[-1] - members[0] >= len(members):
        return f"{', '.join(map(str, members[:3]))} … {members[-1]}"
    return ranks(members).partition(" ")[2]


def layer_words(names: Sequence[str], groups: Iterable[str] = ()) -> str:
    """Return text such as `embed, blocks 0-1, 4-5`, or `blocks 0-3 (stage1, stage2)` with groups of the blocks.

    names: names of layers in the order of the model, of which some may be missing.
    """
    runs: list[list[int]] = []
    for number in map(block_index, filter(is_block, names)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    blocks = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    named = f" ({', '.join(groups)})" if groups else ""
    middle = [f"{'block' if blocks.isdecimal() else 'blocks'} {blocks}{named}"] if runs else []
    place = next((number for number, name in enumerate(names) if is_block(name)), 1)
    others = [name for name in names if not is_block(name)]
    return ", ".join([*others[:place], *middle, *others[place:]])
