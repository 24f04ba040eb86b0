"""Costs of each strategy for each kind of layer, without strategies that another one dominates."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from operator import attrgetter
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import Hops
from vitpar.planner.cost.records import LayerParameters, PipelinePosition, PlacedStrategy, Work
from vitpar.planner.cost.stage import Load, least_load
from vitpar.planner.profile.profiles import LayerKind
from vitpar.planner.search.space import Space
from vitpar.strategy import Plan, Strategy
from vitpar.strategy.execution import LayerExecution
from vitpar.strategy.layout import row_parts, token_layout_key, token_parts

T = TypeVar("T")
N = TypeVar("N")
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Option:
    """A strategy with its least costs for micro-batches of one size."""

    strategy: Strategy
    """The strategy of a layer."""
    loads: dict[LayerKind, Load]
    """Least costs by kind of layer."""
    sections: tuple[Strategy, ...] = ()
    """The strategy of each section, the first of which is `strategy`; empty if all have the same."""


@dataclass(frozen=True, eq=False)
class Choices:
    """The strategies that layers choose from in plans of one outline, and their costs as arrays."""

    options: tuple[Option, ...]
    """The strategies; arrays have one column for each, in this order."""
    kinds: tuple[LayerKind, ...]
    """The kinds of layers; arrays have one row for each, in this order."""
    fronts: tuple[NDArray[np.int64], ...] = ()
    """Columns of the strategies of each section; empty for plans with one strategy in several sections."""

    @cached_property
    def loads(self) -> dict[str, Array]:
        """The fields of `Load` by name, as arrays [kinds, strategies]."""
        names = [field.name for field in fields(Load)]
        values = attrgetter(*names)
        table = np.array([[values(o.loads.get(kind, MISFIT)) for o in self.options] for kind in self.kinds])
        return {name: np.ascontiguousarray(table[..., number]) for number, name in enumerate(names)}

    @cached_property
    def token_share(self) -> Array:
        """Least share of a micro-batch's tokens that a rank holds between layers, by strategy."""
        shares = (max(map(token_parts, option.sections or (option.strategy,))) for option in self.options)
        return np.array([1 / parts for parts in shares])

    @cached_property
    def image_share(self) -> Array:
        """Share of a batch's images that a rank holds, by strategy."""
        return np.array([1 / row_parts(option.strategy) for option in self.options])

    def by_share(self, hops: Callable[[float], Hops]) -> tuple[Array, Array]:
        """Return the fields of `hops` of each strategy's share of tokens, as arrays by strategy."""
        # There are few different shares, and `hops` is slow compared with an array operation.
        shares, inverse = np.unique(self.token_share, return_inverse=True)
        every = [hops(float(share)) for share in shares]
        return np.array([one.each for one in every])[inverse].T, np.array([one.busiest for one in every])[inverse]


MISFIT = Load(waits=1e15, sent_each=1e15, kept=1e30)
"""Costs of a layer that a strategy cannot split: above every limit, but finite, since weights of 0 multiply them."""
Numbers = tuple[float, ...]
Indices = tuple[int, ...]


class _Order:
    """Store of rows of costs by index, with a cached partial order: a row below another is nowhere larger."""

    def __init__(self) -> None:
        self._rows: list[Numbers] = []
        self._known: dict[tuple[int, int], bool] = {}

    def add(self, row: Numbers) -> int:
        """Store `row` and return its index."""
        self._rows.append(row)
        return len(self._rows) - 1

    def total(self, number: int) -> float:
        """Return the sum of a row. A row below another has no larger sum."""
        return sum(self._rows[number])

    def below(self, one: int, other: int) -> bool:
        """Return whether row `one` is nowhere larger than row `other`."""
        if one == other:
            return True
        key = one, other
        if key not in self._known:
            self._known[key] = all(a <= b for a, b in zip(self._rows[one], self._rows[other], strict=True))
        return self._known[key]


@dataclass(frozen=True)
class _Candidate:
    """A strategy of each of some sections that remains after parameter costs are compared."""

    positions: tuple[PipelinePosition, ...]
    """The strategies with their process groups."""
    layout: tuple
    """Key that is equal for strategies with the same token layouts."""
    keeps: Indices
    """Indices of the costs of their parameters in `Options._weights`."""
    unit: int
    """Number that has to divide the rows of a micro-batch."""


class Options:
    """The strategies that layers choose from, by pipeline and rows of a micro-batch, cached.

    A strategy is dropped if another one with the same token layout is at least as good in everything that a price
    depends on. Replacing it in any plan then makes no price worse: redistribution and transfers depend on layouts only.
    Each section of a model drops strategies independently of the others.

    moments: bytes of optimizer state per byte of parameters
    """

    def __init__(self, space: Space, costs: LayerCosts, moments: float) -> None:
        self._space, self._costs, self._moments = space, costs, moments
        self._update = costs.model.optimizer.least * costs.crowd(space.ranks)  # least seconds per element
        self._sections = space.sections.sections
        self._kinds = tuple(costs.config.kinds)
        self._works, self._weights = _Order(), _Order()
        self._work_numbers: dict[tuple[int, int, int], int] = {}
        self._weight_numbers: dict[tuple[int, int, bool], int] = {}
        self._allowed: dict[tuple[int, bool], list[Strategy]] = {}
        self._combined: dict[int, tuple[tuple[Strategy, ...], ...]] = {}
        self._light: dict[tuple[int, bool, Indices], list[_Candidate]] = {}
        self._least: dict[tuple[int, bool, int], tuple[float, ...]] = {}
        self._loads: dict[tuple[LayerKind, PipelinePosition, int, bool], Load] = {}
        self._by_stage: dict[tuple[int, bool, int], Choices] = {}
        self._one: dict[tuple[int, bool, int], Choices] = {}
        self.strategies = 0

    def of(self, pipeline: Plan, rows: int) -> Choices:
        """Return the strategies for a stage of `pipeline` and micro-batches of `rows` images."""
        key = *self._key(pipeline), rows
        if key not in self._by_stage:
            one = len(self._sections) == 1
            self._by_stage[key] = self.uniform(pipeline, rows) if one else self._joined(pipeline, rows)
        return self._by_stage[key]

    def uniform(self, pipeline: Plan, rows: int) -> Choices:
        """Return the strategies as `of` does for plans with one strategy.

        With several sections, each option is one of `Space.combinations`.
        """
        key = *self._key(pipeline), rows
        if key not in self._one:
            every = tuple(range(len(self._sections)))
            front = self._front(pipeline, rows, every)
            fronts = (np.arange(len(front)),) if len(every) == 1 else ()
            self._one[key] = Choices(tuple(self._option(p, rows, pipeline, every) for p in front), self._kinds, fronts)
        return self._one[key]

    def least_work(self, pipeline: Plan, rows: int) -> tuple[float, ...]:
        """Return the least profiled seconds to compute a layer for a micro-batch of `rows` images, by kind of layer.

        Infinite if no strategy can split that many rows; 0 for embed and head.
        """
        key = *self._key(pipeline), rows
        if key not in self._least:
            least = dict.fromkeys(self._kinds, 0.0)
            for number, section in enumerate(self._sections):
                seats = {
                    candidate.positions[0].computes: candidate.positions[0]
                    for candidate in self._lightest(pipeline, (number,))
                    if rows % candidate.unit == 0
                }
                for kind in section.kinds:
                    if kind not in (self._kinds[0], self._kinds[-1]):
                        each = (self._costs.computing(kind, position, rows) for position in seats.values())
                        least[kind] = min(each, default=math.inf)
            self._least[key] = tuple(least.values())
        return self._least[key]

    def _joined(self, pipeline: Plan, rows: int) -> Choices:
        """Return the strategies of all sections together, of which each section has some."""
        fronts = [
            [positions[0] for positions in self._front(pipeline, rows, (number,))]
            for number in range(len(self._sections))
        ]
        every = tuple(dict.fromkeys(position for front in fronts for position in front))
        column = {position: number for number, position in enumerate(every)}
        options = []
        for position in every:
            within = tuple(number for number, front in enumerate(fronts) if position in front)
            options.append(self._option((position,) * len(within), rows, pipeline, within))
        columns = tuple(np.array([column[position] for position in front], dtype=np.int64) for front in fronts)
        return Choices(tuple(options), self._kinds, columns)

    def _key(self, pipeline: Plan) -> tuple[int, bool]:
        """Return a key that is equal for pipelines with the same strategies and costs.

        Those of one degree differ only in whether the schedule splits backward, and exactly then it clashes with +ckpt.
        """
        return pipeline.pipeline_degree, self._space.allows(pipeline, Strategy(checkpoint="full"))

    def _front(self, pipeline: Plan, rows: int, sections: Indices) -> list[tuple[PipelinePosition, ...]]:
        """Return the strategies of `sections` that no other dominates."""
        by_layout: dict[tuple, list[tuple[tuple[PipelinePosition, ...], tuple[Indices, Indices]]]] = defaultdict(list)
        for candidate in self._lightest(pipeline, sections):
            if rows % candidate.unit == 0:
                pairs = zip(sections, candidate.positions, strict=True)
                works = tuple(self._work_number(number, position, rows) for number, position in pairs)
                by_layout[candidate.layout].append((candidate.positions, (works, candidate.keeps)))
        return [one for same in by_layout.values() for one in _front(same, self._total, self._below)]

    def _strategies(self, pipeline: Plan) -> list[Strategy]:
        """Return the strategies that the support matrix and the machine allow in `pipeline`."""
        key = self._key(pipeline)
        if key not in self._allowed:
            host = self._costs.hardware.host is not None
            self._allowed[key] = [
                strategy
                for strategy in self._space.strategies(self._space.ranks // pipeline.pipeline_degree)
                if self._space.allows(pipeline, strategy) and (host or not strategy.offload)
            ]
            self.strategies += len(self._allowed[key])
        return self._allowed[key]

    def _lightest(self, pipeline: Plan, sections: Indices) -> list[_Candidate]:
        """Return the strategies that are not dominated by one with equal computing and layout but cheaper parameters.

        This is independent of the rows of a micro-batch, so it runs once per pipeline and leaves less for `_front`.

        sections: sections to which they belong, one strategy each
        """
        key = *self._key(pipeline), sections
        if key in self._light:
            return self._light[key]
        pp = pipeline.pipeline_degree
        where = PlacedStrategy(pp=pp, splits=pipeline.splits_backward)
        alike: dict[tuple, list[tuple[_Candidate, Indices]]] = defaultdict(list)
        for strategies in self._combinations(pipeline, sections):
            positions = tuple(self._costs.position(strategy, where) for strategy in strategies)
            layout = tuple(map(token_layout_key, strategies))
            pairs = zip(sections, positions, strict=True)
            keeps = tuple(self._weight_number(number, position, pp > 1) for number, position in pairs)
            group = self._costs.teacher.group if self._costs.teacher else 1
            candidate = _Candidate(positions, layout, keeps, math.lcm(*map(row_parts, strategies)) * group)
            alike[layout, tuple(position.computes for position in positions)].append((candidate, keeps))
        self._light[key] = [
            candidate for same in alike.values() for candidate in _front(same, self._lightness, self._lighter)
        ]
        return self._light[key]

    def _combinations(self, pipeline: Plan, sections: Indices) -> Iterable[tuple[Strategy, ...]]:
        """Return the strategies of `sections`, one each: of one section, or those of `Space.combinations`."""
        allowed = self._strategies(pipeline)
        if len(self._sections) == 1:
            return ((strategy,) for strategy in allowed)
        if len(sections) == 1:
            section = self._sections[sections[0]]
            return ((strategy,) for strategy in allowed if section.fits(strategy))
        size = self._space.ranks // pipeline.pipeline_degree
        if size not in self._combined:
            self._combined[size] = self._space.combinations(size)
        known = {*allowed}
        return (strategies for strategies in self._combined[size] if known.issuperset(strategies))

    def _work_number(self, section: int, position: PipelinePosition, rows: int) -> int:
        """Return the index in `_works` of the costs of computing `rows` images of a section under a strategy."""
        key = section, position.computes, rows // position.data
        if key not in self._work_numbers:
            works = (self._costs.work(kind, position, rows) for kind in self._sections[section].kinds)
            self._work_numbers[key] = self._works.add(tuple(part for work in works for part in _of_work(work)))
        return self._work_numbers[key]

    def _weight_number(self, section: int, position: PipelinePosition, pipelined: bool) -> int:
        """Return the index in `_weights` of the costs of a section's parameters under a strategy."""
        key = section, position.keeps, pipelined
        if key not in self._weight_numbers:
            parts = (
                _of_weights(self._costs.weights(kind, position), position.executions[kind])
                for kind in self._sections[section].kinds
            )
            self._weight_numbers[key] = self._weights.add(tuple(part for numbers in parts for part in numbers))
        return self._weight_numbers[key]

    def _lightness(self, numbers: Indices) -> float:
        return sum(map(self._weights.total, numbers))

    def _lighter(self, one: Indices, other: Indices) -> bool:
        return all(map(self._weights.below, one, other))

    def _total(self, numbers: tuple[Indices, Indices]) -> float:
        return sum(map(self._works.total, numbers[0])) + self._lightness(numbers[1])

    def _below(self, one: tuple[Indices, Indices], other: tuple[Indices, Indices]) -> bool:
        return self._lighter(one[1], other[1]) and all(map(self._works.below, one[0], other[0]))

    def _option(self, positions: tuple[PipelinePosition, ...], rows: int, pipeline: Plan, sections: Indices) -> Option:
        """Return an option with the costs of `sections`, whose strategies are at `positions`."""
        pipelined = pipeline.pipeline_degree > 1
        strategies = tuple(position.strategy for position in positions)
        loads: dict[LayerKind, Load] = {}
        for number, position in zip(sections, positions, strict=True):
            for kind in self._sections[number].kinds:
                key = kind, position, rows, pipelined
                if key not in self._loads:
                    self._loads[key] = least_load(
                        self._costs, kind, position, rows, self._moments, self._update, pipelined
                    )
                loads[kind] = self._loads[key]
        return Option(strategies[0], loads, strategies if len({*strategies}) > 1 else ())


def _of_weights(weights: LayerParameters, execution: LayerExecution) -> Numbers:
    """Return the costs of parameters that a price depends on; a larger value of any never lowers a price.

    A cost has one entry for each way in which a step can spend it. Only strategies that spend it the same way are
    comparable: overlapped communication, for example, costs less than the same seconds of waiting. Within a node and
    across nodes other communication progresses meanwhile.
    """
    every, wrapped = execution.reduced == "every micro-batch", execution.wrapped
    freed, here = execution.reshard_after_forward, not weights.offloaded
    shard, scattered = weights.shard_across, weights.reduce - weights.summed
    reduces = (
        *(scattered * (shard is across) for across in (False, True)),
        *(weights.summed * (weights.copies_across is across) for across in (False, True)),
    )
    once = weights.gather * (wrapped and not execution.gathers_every_forward)
    each = weights.gather * (execution.gathers_every_forward + execution.gathers_in_backward)
    return (
        float(weights.trained_elements * here),
        float(weights.trained_elements * weights.offloaded),
        *(gather * (shard is across) for gather in (once, each) for across in (False, True)),
        weights.gathered * (not freed),
        weights.gathered * freed,
        *(reduce * (wrapped and not every) for reduce in reduces),
        *(reduce * (wrapped and every) for reduce in reduces),
        *(reduce * (not wrapped) for reduce in reduces),
        weights.unreduced_grad_bytes * (wrapped and not every),
        weights.unreduced_grad_bytes * (wrapped and every),
        weights.local_bytes * here,
        weights.gathering,
        weights.reducing,
        weights.message,
        *(float(weights.sums.get(axis, 0)) for axis in ("j", "k")),
    )


def _of_work(work: Work) -> Numbers:
    """Return the costs of computing that a price depends on; a larger value of any never lowers a price."""
    return (
        work.forward,
        work.backward - work.beside,
        work.weight_grad_time,
        *work.skew,
        *(
            sent * (work.across is across)
            for sent in (work.forward_sent, work.backward_sent, work.beside)
            for across in (False, True)
        ),
        work.saved,
        work.workspace,
    )


def _front(pairs: list[tuple[T, N]], total: Callable[[N], float], below: Callable[[N, N], bool]) -> list[T]:
    """Return the Pareto front: the items that no other is below; the first of equal ones."""
    # In the order of sums only items that come before can be below one, so the kept ones are the only candidates.
    kept: list[tuple[T, N]] = []
    for item, number in sorted(pairs, key=lambda pair: total(pair[1])):
        if not any(below(other, number) for _, other in kept):
            kept.append((item, number))
    return [item for item, _ in kept]
