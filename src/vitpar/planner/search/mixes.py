"""Good mixes of strategies for the sections of a model, and good splits into stages, by bounds of their costs.

`Search` prices what this module proposes. No proposal is certain to be the best: `vitpar.planner.search.enumeration`
visits the plans that the bounds leave open.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitpar.planner.search.bounds import BYTES, EACH, LIMITED
from vitpar.planner.search.options import Array
from vitpar.planner.search.tables import LayerTable, MixTable, seconds_of

Runs = list[tuple[int, int]]
"""(first block, column of its strategy) wherever the strategy changes in a stage."""
MOST = 40
"""Number of mixes to combine at most."""
FEW = 10
"""Number of mixes that are combined in pairs within a stage of a pipeline at most."""
NEAR = 2
"""Blocks by which the ends of a stage move while pairs of mixes are tried."""
RATIOS = [2.0**power for power in range(-7, 8)]
_TIMES = (0, 1, 2, 3, 4)
DUALS = np.array(
    [list(row) for row in np.eye(7)]
    + [
        list((np.eye(7)[time] * ratio + np.eye(7)[size]) / (1 + ratio))
        for time in (0, 2, 3)
        for size in (5, 6)
        for ratio in RATIOS
    ]
)
"""Weights of limits (rows of `LIMITED`) for which the cheapest mix is found, [weights, limits]."""


@dataclass(frozen=True)
class Proposal:
    """Stages of a plan with a lower bound on its time."""

    seconds: float
    """Least seconds of a step, without what a step spends outside layers."""
    stages: tuple[tuple[int, Runs], ...]
    """(number of blocks, strategies) of each stage."""


def cheapest_mixes(table: LayerTable, limits: Array) -> NDArray[np.int64]:
    """Return the mixes that are cheapest for some of `DUALS`, [mixes, sections].

    limits: limits in the order of `LIMITED`, which the costs are divided by
    """
    sections, fronts = table.sections, table.choices.fronts
    last = table.outline.pipeline.num_stages - 1
    distinct: dict[tuple[int, ...], None] = {}
    for number in dict.fromkeys((0, last)):
        layers = table.sums(number).layers[LIMITED] / limits[:, None, None]
        costs = np.tensordot(DUALS, layers, 1)  # [weights, kinds, strategies]
        waits = DUALS @ (table.waits[LIMITED] / limits)
        best, back = np.zeros((len(DUALS), 0)), list[NDArray[np.int64]]()
        for part, section in enumerate(sections.sections):
            rows = [sections.rows[block] for block in section.blocks]
            rows += [0] * (part == 0) + [len(sections.kinds) - 1] * (part == len(fronts) - 1)
            here = costs[:, rows].sum(1)[:, fronts[part]]
            if part:
                # Redistribution depends on layouts only: the cheapest strategy of each layout is enough.
                cheapest, places = _by_layout(best, table.layout[fronts[part - 1]])
                through = (
                    cheapest[:, :, None] + waits[:, None, None] * table.moved(section.blocks[0])[: cheapest.shape[1]]
                )
                before, layouts = through.argmin(1), table.layout[fronts[part]]
                back.append(np.take_along_axis(places, before, 1)[:, layouts])
                here = here + through.min(1)[:, layouts]
            best = here
        chosen = best.argmin(1)
        for weight in range(len(DUALS)):
            place = int(chosen[weight])
            mix = [int(fronts[-1][place])]
            for part in range(len(fronts) - 2, -1, -1):
                place = int(back[part][weight, place])
                mix.insert(0, int(fronts[part][place]))
            distinct[tuple(mix)] = None
    return np.array(list(distinct)[:MOST])


def _by_layout(costs: Array, layouts: NDArray[np.int64]) -> tuple[Array, NDArray[np.int64]]:
    """Return (the least of `costs` [weights, strategies] by layout, its place), infinite for layouts of no strategy."""
    count = int(layouts.max()) + 1
    least, places = np.full((len(costs), count), np.inf), np.zeros((len(costs), count), dtype=np.int64)
    for layout in np.unique(layouts).tolist():
        (inside,) = np.nonzero(layouts == layout)
        places[:, layout] = inside[costs[:, inside].argmin(1)]
        least[:, layout] = costs[:, inside].min(1)
    return least, places


class Proposals:
    """Plans of one outline from the mixes of a table.

    overhead: seconds of a step outside layers
    hop: seconds of a micro-batch between two stages, there and back
    memory: bytes of a rank by the bounds
    """

    def __init__(self, mixes: MixTable, overhead: float, hop: float, memory: float) -> None:
        self._mixes, self._overhead, self._hop = mixes, overhead, hop
        self._outline, self._memory = mixes.table.outline, memory
        self._stages, self._depth = self._outline.pipeline.num_stages, mixes.depth

    def single(self) -> Iterator[Proposal]:
        """Yield plans of one stage: each mix alone and pairs of mixes one after the other, fastest first."""
        sums = self._mixes.intervals(0)[:, 0, -1]  # [8, mixes]
        time = np.where((sums[BYTES] <= self._memory).all(0), seconds_of(sums), np.inf)
        pairs = self._mixes.two(0, 0, self._depth)
        both = np.where((pairs[BYTES] <= self._memory).all(0), seconds_of(pairs), np.inf)
        one, two = np.sort(time), np.sort(both, axis=None)
        order_one, order_two = time.argsort(kind="stable"), both.argsort(axis=None, kind="stable")
        at = 0
        for seconds, place in zip(two.tolist(), order_two.tolist(), strict=True):
            while at < len(one) and one[at] <= seconds and one[at] < np.inf:
                yield Proposal(float(one[at]), ((self._depth, self._runs(0, self._depth, int(order_one[at]))),))
                at += 1
            if seconds == np.inf:
                return
            middle, first, second = np.unravel_index(place, both.shape)
            runs = self._runs(0, self._depth, int(first), int(second), int(middle) + 1)
            yield Proposal(seconds, ((self._depth, runs),))
        while at < len(one) and one[at] < np.inf:
            yield Proposal(float(one[at]), ((self._depth, self._runs(0, self._depth, int(order_one[at]))),))
            at += 1

    def pipelined(self) -> list[Proposal]:
        """Return plans of several stages, fastest first: of one mix, of a mix per stage, of two mixes per stage."""
        depth, stages = self._depth, self._stages
        count = len(self._mixes.mixes)
        alone, own = np.full((depth + 1, count), np.inf), np.full(depth + 1, np.inf)
        alone[0], own[0] = 0.0, 0.0
        before_alone, before = np.zeros((depth + 1, count)), np.zeros(depth + 1)
        cuts_alone, cuts = list[NDArray[np.int64]](), list[NDArray[np.int64]]()
        delays = not self._outline.pipeline.splits_backward
        for number in range(stages):
            sums = self._mixes.intervals(number)
            time = np.where((sums[BYTES] <= self._memory).all(0), seconds_of(sums), np.inf)  # [i, j, mixes]
            self._confine(time, number)
            each = np.where(np.isfinite(time), sums[EACH], 0.0)
            reach = np.maximum(alone[:, None], np.maximum(time, sums[0] + delays * before_alone[:, None]))
            cut = reach.argmin(0)
            cuts_alone.append(cut)
            alone = np.take_along_axis(reach, cut[None], 0)[0]
            before_alone = (
                np.take_along_axis(before_alone, cut, 0) + np.take_along_axis(each, cut[None], 0)[0] + self._hop
            )
            best = np.maximum(own[:, None, None], np.maximum(time, sums[0] + delays * before[:, None, None]))
            flat = best.transpose(1, 0, 2).reshape(depth + 1, -1)
            place = flat.argmin(1)
            cuts.append(place)
            own = flat[np.arange(depth + 1), place]
            start, mix = place // count, place % count
            before = before[start] + each[start, np.arange(depth + 1), mix] + self._hop
        proposals = [
            Proposal(float(alone[depth, mix]), self._path([cut[:, mix] * count + mix for cut in cuts_alone]))
            for mix in alone[depth].argsort(kind="stable")[:FEW].tolist()
            if np.isfinite(alone[depth, mix])
        ]
        if np.isfinite(own[depth]):
            proposals.append(Proposal(float(own[depth]), self._path(cuts)))
            proposals += self._refined(proposals)
        return sorted(proposals, key=lambda proposal: proposal.seconds)

    def _confine(self, time: Array, number: int) -> None:
        """Make impossible the intervals that leave a stage without blocks."""
        left = self._stages - 1 - number
        time[:number] = np.inf
        time[:, self._depth - left + 1 :] = np.inf
        if number == 0:
            time[1:] = np.inf
        if left == 0:
            time[:, : self._depth] = np.inf

    def _path(self, cuts: list[NDArray[np.int64]]) -> tuple[tuple[int, Runs], ...]:
        """Return the stages that `cuts` lead to: per stage, by its end, its start · mixes + mix."""
        stages, stop = list[tuple[int, Runs]](), self._depth
        for cut in reversed(cuts):
            start, mix = divmod(int(cut[stop]), len(self._mixes.mixes))
            stages.insert(0, (stop - start, self._runs(start, stop, mix)))
            stop = start
        return tuple(stages)

    def _refined(self, known: list[Proposal]) -> list[Proposal]:
        """Return a plan near the fastest one of `known`, with two mixes in the stages where that is faster."""
        base = min(known, key=lambda proposal: proposal.seconds)
        ends = [0]
        for blocks, _ in base.stages:
            ends.append(ends[-1] + blocks)
        used = {column for proposal in known for _, runs in proposal.stages for _, column in runs}
        score = np.isin(self._mixes.mixes, list(used)).sum(1)
        some = np.sort(score.argsort(kind="stable")[::-1][:FEW])
        part = MixTable(self._mixes.table, self._mixes.mixes[some])
        inner = Proposals(part, self._overhead, self._hop, self._memory)
        delays = not self._outline.pipeline.splits_backward
        best: dict[int, tuple[float, float, tuple[tuple[int, Runs], ...]]] = {0: (0.0, 0.0, ())}
        for number in range(self._stages):
            reached: dict[int, tuple[float, float, tuple[tuple[int, Runs], ...]]] = {}
            left = self._stages - 1 - number
            for start, (worst, before, stages) in best.items():
                for stop in range(max(start + 1, ends[number + 1] - NEAR), ends[number + 1] + NEAR + 1):
                    if stop > self._depth - left or (left == 0) != (stop == self._depth):
                        continue
                    way = inner.quickest(number, start, stop)
                    if way is None:
                        continue
                    seconds, through, each, runs = way
                    time = max(worst, seconds, through + delays * before)
                    if stop not in reached or time < reached[stop][0]:
                        reached[stop] = time, before + each + self._hop, (*stages, (stop - start, runs))
            best = reached
        return [Proposal(seconds, stages) for seconds, _, stages in best.values()]

    def quickest(self, number: int, start: int, stop: int) -> tuple[float, float, float, Runs] | None:
        """Return (seconds, seconds of row 0, seconds of a micro-batch, strategies) of the fastest way to run a stage.

        None if none fits into memory.
        """
        prefixes, sections = self._mixes.prefixes(number), self._mixes.table
        alone = prefixes[:, stop] - prefixes[:, start] + sections.waits[:, None] * self._mixes.inside[start, stop]
        layer_sums = sections.sums(number)
        alone[BYTES] += layer_sums.besides
        if start == 0:
            alone += self._mixes.start(number)
        if stop == self._depth:
            alone += layer_sums.layers[:, -1, self._mixes.mixes[:, -1]]
        alone[-1] += layer_sums.working[sections.sections.rows[stop - 1], self._mixes.columns[stop - 1]]
        time = np.where((alone[BYTES] <= self._memory).all(0), seconds_of(alone), np.inf)
        one = int(time.argmin())
        best = float(time[one]), float(alone[0, one]), float(alone[EACH, one]), self._runs(start, stop, one)
        if stop - start > 1:
            pairs = self._mixes.two(number, start, stop)
            both = np.where((pairs[BYTES] <= self._memory).all(0), seconds_of(pairs), np.inf)
            place = np.unravel_index(int(both.argmin()), both.shape)
            if both[place] < best[0]:
                middle, first, second = map(int, place)
                runs = self._runs(start, stop, first, second, middle + 1)
                best = float(both[place]), float(pairs[0][place]), float(pairs[EACH][place]), runs
        return best if np.isfinite(best[0]) else None

    def _runs(self, start: int, stop: int, mix: int, other: int | None = None, first: int = 0) -> Runs:
        """Return the strategies of blocks `start` to `stop` - 1: `first` blocks under `mix`, the rest under `other`."""
        runs: Runs = []
        for block in range(start, stop):
            one = mix if other is None or block - start < first else other
            column = int(self._mixes.columns[block, one])
            if not runs or runs[-1][1] != column:
                runs.append((block, column))
        return runs
