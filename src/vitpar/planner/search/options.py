"""Costs of each strategy for each kind of layer, without strategies that another one dominates."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from vitpar.planner.cost.layer import LayerCosts, LayerParameters, PipelinePosition, PlacedStrategy, Work
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


@dataclass(frozen=True, eq=False)
class Choices:
    """The strategies that layers choose from in plans of one kind, and their costs as arrays."""

    options: tuple[Option, ...]
    """The strategies; arrays have one column for each, in this order."""
    kinds: tuple[LayerKind, ...]
    """The kinds of layers; arrays have one row for each, in this order."""

    @cached_property
    def loads(self) -> dict[str, Array]:
        """The fields of `Load` by name, as arrays [3, strategies] with rows for embed, block and head."""
        return {
            field.name: np.array([[getattr(o.loads[kind], field.name) for o in self.options] for kind in self.kinds])
            for field in fields(Load)
        }

    @cached_property
    def token_share(self) -> Array:
        """Share of a micro-batch's tokens that a rank holds between layers, by strategy."""
        return np.array([1 / token_parts(option.strategy) for option in self.options])

    @cached_property
    def image_share(self) -> Array:
        """Share of a batch's images that a rank holds, by strategy."""
        return np.array([1 / row_parts(option.strategy) for option in self.options])

    def by_share(self, seconds: Callable[[float], float]) -> Array:
        """Return `seconds` of each strategy's share of the tokens, as an array by strategy."""
        # There are few different shares, and `seconds` is slow compared with an array operation.
        shares, inverse = np.unique(self.token_share, return_inverse=True)
        return np.array([seconds(float(share)) for share in shares])[inverse]


Numbers = tuple[float, ...]


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
    """A strategy that remains after parameter costs are compared."""

    position: PipelinePosition
    """The strategy with its process groups."""
    layout: tuple
    """Key that is equal for strategies with the same token layout."""
    keeps: int
    """Index of the costs of its parameters in `Options._weights`."""
    unit: int
    """Number that has to divide the rows of a micro-batch."""


class Options:
    """The strategies that layers choose from, by pipeline and rows of a micro-batch, cached.

    A strategy is dropped if another one with the same token layout is at least as good in everything that a price
    depends on. Replacing it in any plan then makes no price worse: redistribution and transfers depend on layouts only.

    moments: bytes of optimizer state per byte of parameters
    """

    def __init__(self, space: Space, costs: LayerCosts, moments: float) -> None:
        self._space, self._costs, self._moments = space, costs, moments
        self._update = costs.model.optimizer.least * costs.crowd(space.ranks)  # least seconds per element
        self._kinds = tuple(costs.config.kinds)
        self._works, self._weights = _Order(), _Order()
        self._work_numbers: dict[tuple[int, int], int] = {}
        self._weight_numbers: dict[tuple[int, bool], int] = {}
        self._light: dict[tuple[int, bool], list[_Candidate]] = {}
        self._least: dict[tuple[int, bool, int], float] = {}
        self._found: dict[tuple[int, bool, int], Choices] = {}
        self.strategies = 0

    def of(self, pipeline: Plan, rows: int) -> Choices:
        """Return the strategies for a stage of `pipeline` and micro-batches of `rows` images."""
        key = *self._key(pipeline), rows
        if key not in self._found:
            pipelined = pipeline.pipeline_degree > 1
            by_layout: dict[tuple, list[tuple[PipelinePosition, tuple[int, int]]]] = defaultdict(list)
            for found in self._lightest(pipeline):
                if rows % found.unit == 0:
                    by_layout[found.layout].append(
                        (found.position, (self._work_number(found.position, rows), found.keeps))
                    )
            self._found[key] = Choices(
                tuple(
                    self._option(position, rows, pipelined)
                    for same in by_layout.values()
                    for position in _front(same, self._total, self._below)
                ),
                self._kinds,
            )
        return self._found[key]

    def least_work(self, pipeline: Plan, rows: int) -> float:
        """Return the least profiled seconds to compute all blocks on one stage for a micro-batch of `rows` images.

        Infinite if no strategy can split that many rows.
        """
        key = *self._key(pipeline), rows
        if key not in self._least:
            seats = {
                found.position.computes: found.position for found in self._lightest(pipeline) if rows % found.unit == 0
            }
            each = min(
                (self._costs.computing("block", position, rows) for position in seats.values()), default=math.inf
            )
            self._least[key] = each * self._space.config.num_blocks
        return self._least[key]

    def _key(self, pipeline: Plan) -> tuple[int, bool]:
        """Return a key that is equal for pipelines with the same strategies and costs.

        Those of one degree differ only in whether the schedule splits backward, and exactly then it clashes with +ckpt.
        """
        return pipeline.pipeline_degree, self._space.allows(pipeline, Strategy(checkpoint="full"))

    def _lightest(self, pipeline: Plan) -> list[_Candidate]:
        """Return the strategies that are not dominated by one with equal computing and layout but cheaper parameters.

        This is independent of the rows of a micro-batch, so it runs once per pipeline and leaves less for `of`.
        """
        key = self._key(pipeline)
        if key in self._light:
            return self._light[key]
        pp = pipeline.pipeline_degree
        where = PlacedStrategy(pp=pp, splits=pipeline.splits_backward)
        alike: dict[tuple, list[tuple[_Candidate, int]]] = defaultdict(list)
        for strategy in self._space.strategies(self._space.ranks // pp):
            if not self._space.allows(pipeline, strategy) or (strategy.offload and self._costs.hardware.host is None):
                continue
            self.strategies += 1
            position, layout = self._costs.position(strategy, where), token_layout_key(strategy)
            found = _Candidate(position, layout, self._weight_number(position, pp > 1), row_parts(strategy))
            alike[layout, position.computes].append((found, found.keeps))
        self._light[key] = [
            found for same in alike.values() for found in _front(same, self._weights.total, self._weights.below)
        ]
        return self._light[key]

    def _work_number(self, position: PipelinePosition, rows: int) -> int:
        """Return the index in `_works` of the costs of computing `rows` images under a strategy."""
        key = position.computes, rows // position.data
        if key not in self._work_numbers:
            works = (self._costs.work(kind, position, rows) for kind in self._kinds)
            self._work_numbers[key] = self._works.add(tuple(part for work in works for part in _of_work(work)))
        return self._work_numbers[key]

    def _weight_number(self, position: PipelinePosition, pipelined: bool) -> int:
        """Return the index in `_weights` of the costs of a strategy's parameters."""
        key = position.keeps, pipelined
        if key not in self._weight_numbers:
            parts = (
                _of_weights(self._costs.weights(kind, position), position.executions[kind]) for kind in self._kinds
            )
            self._weight_numbers[key] = self._weights.add(tuple(part for numbers in parts for part in numbers))
        return self._weight_numbers[key]

    def _total(self, numbers: tuple[int, int]) -> float:
        return self._works.total(numbers[0]) + self._weights.total(numbers[1])

    def _below(self, one: tuple[int, int], other: tuple[int, int]) -> bool:
        return self._weights.below(one[1], other[1]) and self._works.below(one[0], other[0])

    def _option(self, position: PipelinePosition, rows: int, pipelined: bool) -> Option:
        return Option(
            position.strategy,
            {
                kind: least_load(self._costs, kind, position, rows, self._moments, self._update, pipelined)
                for kind in self._kinds
            },
        )


def _of_weights(weights: LayerParameters, execution: LayerExecution) -> Numbers:
    """Return the costs of parameters that a price depends on; a larger value of any never lowers a price.

    A cost has one entry for each way in which a step can spend it. Only strategies that spend it the same way are
    comparable: overlapped communication, for example, costs less than the same seconds of waiting.
    """
    every, wrapped = execution.reduced == "every micro-batch", execution.wrapped
    freed, here = execution.reshard_after_forward, not weights.offloaded
    return (
        float(weights.elements * here),
        float(weights.elements * weights.offloaded),
        weights.gather * (wrapped and not execution.gathers_every_forward),
        weights.gather * (execution.gathers_every_forward + execution.gathers_in_backward),
        weights.gathered * (not freed),
        weights.gathered * freed,
        weights.reduce * (wrapped and not every),
        weights.reduce * (wrapped and every),
        weights.reduce * (not wrapped),
        weights.unreduced_grad_bytes * (wrapped and not every),
        weights.unreduced_grad_bytes * (wrapped and every),
        weights.local_bytes * here,
        weights.gathering,
        weights.reducing,
        *(float(weights.sums.get(axis, 0)) for axis in ("j", "k")),
    )


def _of_work(work: Work) -> Numbers:
    """Return the costs of computing that a price depends on; a larger value of any never lowers a price."""
    return (
        work.forward,
        work.backward,
        work.weight_grad_time,
        *work.skew,
        work.forward_sent,
        work.backward_sent,
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
