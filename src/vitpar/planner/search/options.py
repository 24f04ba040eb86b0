"""Strategies that the layers of an outline's plans choose from, with their costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import Hops
from vitpar.planner.cost.records import PipelinePosition, PlacedStrategy
from vitpar.planner.search.loads import Array, Indices, Layers, Loads
from vitpar.planner.search.space import Space
from vitpar.strategy import Plan, Strategy
from vitpar.strategy.layout import row_parts, token_layout_key, token_parts


@dataclass(frozen=True, eq=False)
class Choices:
    """Strategies, or one for each section in plans with counterparts, and their costs."""

    strategies: tuple[tuple[Strategy, ...], ...]
    """Strategy of each section, or one for any section; arrays have a column for each, in this order."""
    loads: Loads
    """Least costs of each kind of layer."""
    fronts: tuple[Indices, ...]
    """Columns that each section can have."""

    @cached_property
    def token_share(self) -> Array:
        """Least share of a micro-batch's tokens that a rank holds between layers, by column."""
        return np.array([1 / max(map(token_parts, each)) for each in self.strategies])

    @cached_property
    def image_share(self) -> Array:
        """Share of a batch's images that a rank holds, by column."""
        return np.array([1 / row_parts(each[0]) for each in self.strategies])

    def by_share(self, hops: Callable[[float], Hops]) -> tuple[Array, Array]:
        """Return the fields of `hops` of each column's share of tokens, as arrays by column."""
        # There are few different shares, and `hops` is slow compared with an array operation.
        shares, inverse = np.unique(self.token_share, return_inverse=True)
        every = [hops(float(share)) for share in shares]
        return np.array([one.each for one in every])[inverse].T, np.array([one.busiest for one in every])[inverse]


class Options:
    """The strategies of layers by pipeline and rows of a micro-batch, cached.

    moments: bytes of optimizer state per byte of parameters
    """

    def __init__(self, space: Space, costs: LayerCosts, moments: float) -> None:
        self._space, self._costs, self._moments = space, costs, moments
        self._update = costs.model.optimizer.least * costs.crowd(space.ranks)  # least seconds per element
        self._sections = space.sections.sections
        kinds = tuple(costs.config.kinds)
        self._section_of_kind = np.array(
            [next(n for n, section in enumerate(self._sections) if kind in section.kinds) for kind in kinds]
        )
        self._layers: dict[tuple[int, bool], tuple[Layers, Indices]] = {}
        self._least: dict[tuple[int, bool, int], tuple[float, ...]] = {}
        self._choices: dict[tuple[int, bool, int], Choices] = {}
        self._uniform: dict[tuple[int, bool, int], Choices] = {}
        self.strategies = 0

    def of(self, pipeline: Plan, rows: int) -> Choices:
        """Return the strategies for a stage of `pipeline` and micro-batches of `rows` images."""
        key = *self._key(pipeline), rows
        if key not in self._choices:
            layers, units = self._of_pipeline(pipeline)
            columns = np.nonzero(rows % units == 0)[0]
            loads = layers.least_loads(columns, rows, self._moments, self._update, pipeline.pipeline_degree > 1)
            fits = [section.kinds for section in self._sections]
            kinds = tuple(self._costs.config.kinds)
            fronts = tuple(np.nonzero(layers.fits[kinds.index(own[0])][columns])[0] for own in fits)
            strategies = tuple((layers.positions[column].strategy,) for column in columns.tolist())
            self._choices[key] = Choices(strategies, loads, fronts)
        return self._choices[key]

    def uniform(self, pipeline: Plan, rows: int) -> Choices:
        """Return the strategies as `of` does, of plans with one or its counterparts where it does not fit."""
        if len(self._sections) == 1:
            return self.of(pipeline, rows)
        key = *self._key(pipeline), rows
        if key not in self._uniform:
            choices = self.of(pipeline, rows)
            column = {strategy: number for number, (strategy,) in enumerate(choices.strategies)}
            size = self._space.ranks // pipeline.pipeline_degree
            plans = [each for each in self._space.combinations(size) if column.keys() >= {*each}]
            columns = np.array([[column[strategy] for strategy in each] for each in plans], dtype=np.int64)
            of_kind = columns.reshape(-1, len(self._sections))[:, self._section_of_kind].T
            loads = choices.loads.at(np.arange(len(of_kind))[:, None], of_kind)
            self._uniform[key] = Choices(tuple(plans), loads, ())
        return self._uniform[key]

    def least_work(self, pipeline: Plan, rows: int) -> tuple[float, ...]:
        """Return the least profiled seconds to compute a layer for a micro-batch of `rows` images, by kind of layer.

        Infinite if no strategy can split that many rows; 0 for embed and head.
        """
        key = *self._key(pipeline), rows
        if key not in self._least:
            (layers, units), kinds = self._of_pipeline(pipeline), tuple(self._costs.config.kinds)
            least = [0.0, *[math.inf] * (len(kinds) - 2), 0.0]
            seats = {
                position.computes: number
                for number, (position, unit) in enumerate(zip(layers.positions, units.tolist(), strict=True))
                if rows % unit == 0
            }
            for row in range(1, len(kinds) - 1):
                for number in seats.values():
                    if layers.fits[row, number]:
                        seconds = self._costs.computing(kinds[row], layers.positions[number], rows)
                        least[row] = min(least[row], seconds)
            self._least[key] = tuple(least)
        return self._least[key]

    def _key(self, pipeline: Plan) -> tuple[int, bool]:
        """Return a key that is equal for pipelines with the same strategies and costs.

        Those of one degree differ only in whether the schedule splits backward.
        """
        return pipeline.pipeline_degree, pipeline.splits_backward

    def _of_pipeline(self, pipeline: Plan) -> tuple[Layers, Indices]:
        """Return the strategies that the support matrix and the machine allow in `pipeline`.

        Of those with equal layouts and computing, a strategy is dropped if the parameters of another one cost no more.
        Also return the numbers that have to divide the rows of a micro-batch.
        """
        key = self._key(pipeline)
        if key not in self._layers:
            pp, costs = pipeline.pipeline_degree, self._costs
            where = PlacedStrategy(pp=pp, splits=pipeline.splits_backward)
            host, allowed = costs.hardware.host is not None, list[Strategy]()
            for strategy in self._space.strategies(self._space.ranks // pp):
                if (host or not strategy.offload) and self._space.allows(pipeline, strategy):
                    allowed.append(strategy)
            self.strategies += len(allowed)
            distinct: dict[tuple[int, int, Hashable, Strategy | None], PipelinePosition] = {}
            for strategy in allowed:
                position = costs.position(strategy, where)
                # Plans with counterparts name their strategies: none of these is left out.
                name = None if len(self._sections) == 1 else strategy
                distinct.setdefault((position.computes, position.keeps, token_layout_key(strategy), name), position)
            positions, keys = tuple(distinct.values()), list(distinct)
            fitting = [[section.fits(position.strategy) for position in positions] for section in self._sections]
            fits = np.array(fitting, dtype=bool)[self._section_of_kind]
            layers = Layers(costs, positions, fits)
            if len(self._sections) == 1 and positions:
                alike = {(computes, layout): n for n, (computes, _, layout, _) in enumerate(keys)}
                layers = layers.lightest(np.array([alike[computes, layout] for computes, _, layout, _ in keys]))
            group = costs.teacher.group if costs.teacher else 1
            units = np.array([row_parts(position.strategy) * group for position in layers.positions], dtype=np.int64)
            self._layers[key] = layers, units
        return self._layers[key]
