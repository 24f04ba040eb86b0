"""Strategies that the layers of an outline's plans choose from, with their costs."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vitpar.planner.cost.layer import LayerCosts
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


class Options:
    """The strategies of layers by pipeline and rows of a micro-batch, cached.

    moments: bytes of optimizer state per byte of parameters
    """

    def __init__(self, space: Space, costs: LayerCosts, moments: float) -> None:
        self._space, self._costs, self._moments = space, costs, moments
        self._sections = space.sections.sections
        kinds = tuple(costs.config.kinds)
        self._section_of_kind = np.array(
            [next(n for n, section in enumerate(self._sections) if kind in section.kinds) for kind in kinds]
        )
        self._ways: dict[tuple[int, bool], list[tuple[Strategy, bool, int]]] = {}
        self._layers: dict[tuple[int, bool], tuple[Layers, Indices, Indices]] = {}
        self._least: dict[tuple[int, bool, int], tuple[float, ...]] = {}
        self._choices: dict[tuple[int, bool, int], Choices] = {}
        self._uniform: dict[tuple[int, bool, int], Choices] = {}
        self.strategies = 0

    def of(self, pipeline: Plan, rows: int) -> Choices:
        """Return the strategies for a stage of `pipeline` and micro-batches of `rows` images."""
        key = *self._key(pipeline), rows
        if key not in self._choices:
            layers, kept, units = self._of_pipeline(pipeline)
            columns = kept[rows % units == 0]
            loads = layers.least_loads(columns, rows, self._moments, pipeline.pipeline_degree > 1)
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
            least = dict.fromkeys(self._costs.config.kinds, math.inf)
            for strategy, wrapped, unit in self._ways_to_compute(pipeline):
                for section in self._sections if rows % unit == 0 else ():
                    for kind in section.kinds if section.fits(strategy) else ():
                        least[kind] = min(least[kind], self._costs.computing(kind, strategy, wrapped, rows))
            self._least[key] = (0.0, *list(least.values())[1:-1], 0.0)
        return self._least[key]

    def _ways_to_compute(self, pipeline: Plan) -> list[tuple[Strategy, bool, int]]:
        """Return strategies that compute differently, whether they wrap layers, and what divides their rows, cached."""
        key = self._key(pipeline)
        if key not in self._ways:
            rules, ways = self._costs.rules(self._place(pipeline)), dict[Hashable, tuple[Strategy, bool, int]]()
            for strategy in self._allowed(pipeline):
                wrapped, tensor = rules.wraps(strategy), (strategy.tensor_flag, strategy.degree("tp"))
                ways.setdefault((tensor, strategy.checkpoint, wrapped), (strategy, wrapped, self._unit(strategy)))
            self._ways[key] = list(ways.values())
        return self._ways[key]

    def _allowed(self, pipeline: Plan) -> Iterator[Strategy]:
        """Yield the strategies that the support matrix and the machine allow in `pipeline`."""
        for strategy in self._space.strategies(self._space.ranks // pipeline.pipeline_degree):
            if (self._costs.hardware.host or not strategy.offload) and self._space.allows(pipeline, strategy):
                yield strategy

    def _place(self, pipeline: Plan) -> PlacedStrategy:
        return PlacedStrategy(pp=pipeline.pipeline_degree, splits=pipeline.splits_backward)

    def _unit(self, strategy: Strategy) -> int:
        """Return the number that has to divide the rows of a micro-batch."""
        return row_parts(strategy) * (self._costs.teacher.group if self._costs.teacher else 1)

    def _key(self, pipeline: Plan) -> tuple[int, bool]:
        """Return a key that is equal for pipelines with the same strategies and costs.

        Those of one degree differ only in whether the schedule splits backward.
        """
        return pipeline.pipeline_degree, pipeline.splits_backward

    def _of_pipeline(self, pipeline: Plan) -> tuple[Layers, Indices, Indices]:
        """Return the costs of the parameters of the strategies in `pipeline`, cached.

        Of those with equal layouts and costs there is one. Also return the numbers of the strategies to choose from,
        which are those whose parameters cost less than others with equal layouts and computing, and what divides their
        rows.
        """
        key = self._key(pipeline)
        if key not in self._layers:
            distinct = dict[tuple[tuple[Hashable, ...], int, Hashable], PipelinePosition]()
            where, one_section = self._place(pipeline), len(self._sections) == 1
            for strategy in self._allowed(pipeline):
                self.strategies += 1
                position = self._costs.position(strategy, where)
                # Plans with counterparts name their strategies: none of these is left out.
                alike = position.computes, token_layout_key(strategy)
                distinct.setdefault((alike, position.keeps, one_section or strategy), position)
            positions = tuple(distinct.values())
            fitting = [[section.fits(one.strategy) for one in positions] for section in self._sections]
            layers = Layers(self._costs, positions, np.array(fitting, dtype=bool)[self._section_of_kind])
            kept = np.arange(len(positions))
            if one_section and positions:
                groups = {alike: number for number, (alike, *_) in enumerate(distinct)}
                kept = layers.lightest(np.array([groups[alike] for alike, *_ in distinct]))
            units = [self._unit(positions[column].strategy) for column in kept.tolist()]
            self._layers[key] = layers, kept, np.array(units, dtype=np.int64)
        return self._layers[key]
