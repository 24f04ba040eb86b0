"""Costs of the plans of a space: prices by the replay, and least costs by outline for the search."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property

import numpy as np

from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import Hops, Price, hop_seconds, norm_seconds, place_bytes, price
from vitpar.planner.cost.records import PlacedStrategy
from vitpar.planner.cost.stage import exchange_seconds
from vitpar.planner.search.bounds import Machine, PlanOutline, ideal_seconds
from vitpar.planner.search.loads import Array
from vitpar.planner.search.options import Choices, Options
from vitpar.planner.search.relaxed import STEPS, least_seconds
from vitpar.planner.search.sections import Sections
from vitpar.planner.search.space import Space, tied_layers, with_tied_alike
from vitpar.planner.search.tables import Moves, received_shares
from vitpar.strategy import Plan, Strategy, token_layout
from vitpar.strategy.layout import token_layout_key
from vitpar.strategy.selectors import Groups
from vitpar.strategy.stages import split_blocks

ROUNDING = 1e-9
"""Relative tolerance of the memory budget in bounds."""


class CostedSpace:
    """The plans of a space with their costs for one model and cluster. Prices are cached.

    space: plans to consider
    costs: costs of layers from the profiles
    moments: bytes of optimizer state per byte of parameters (2 for AdamW)
    """

    def __init__(self, space: Space, costs: LayerCosts, moments: float = 2) -> None:
        self.space, self.costs, self._moments = space, costs, moments
        self.tied = tied_layers(costs.config)
        self._options = Options(space, costs, moments)
        self._prices: dict[tuple[Plan, int], Price] = {}
        self._shares: dict[tuple[object, ...], Array] = {}

    def price(self, plan: Plan, batch_size: int) -> Price:
        """Return the price of a validated plan, cached."""
        key = plan, batch_size
        if key not in self._prices:
            self._prices[key] = self._price(plan, batch_size)
        return self._prices[key]

    def _price(self, plan: Plan, batch_size: int) -> Price:
        return price(plan, self.costs, batch_size, self._moments)

    def place_bytes(self, plan: Plan, batch_size: int) -> tuple[float, ...]:
        """Return the peak bytes of the fullest rank at each index of the pp axis, for a validated plan."""
        return place_bytes(plan, self.costs, batch_size, self._moments)

    def fits(self, plan: Plan, batch_size: int, budget: float) -> bool:
        if self._separates(plan):
            return False
        known = self._prices.get((plan, batch_size))
        return (known.memory_bytes if known else max(self.place_bytes(plan, batch_size))) <= budget

    def _separates(self, plan: Plan) -> bool:
        """Return whether layers that share a parameter have different strategies, which the runtime refuses."""
        return next(with_tied_alike(plan, self.costs.config, self.tied)) != plan

    @cached_property
    def _ideals(self) -> list[tuple[float, PlanOutline]]:
        """Outlines of all plans, each with a cheap lower bound on the seconds per image (`_ideal`)."""
        return [(self._ideal(outline), outline) for outline in self._outlines()]

    def _outlines(self) -> Iterator[PlanOutline]:
        for batch_size in self.space.batch_sizes:
            for pipeline in self.space.pipelines():
                for microbatches in self.space.microbatches(pipeline, batch_size):
                    yield PlanOutline(pipeline, batch_size, microbatches)

    def options(self, outline: PlanOutline) -> Choices:
        """Return the strategies that layers of an outline's plans choose from, with their costs."""
        return self._options.of(outline.pipeline, outline.rows)

    def uniform_options(self, outline: PlanOutline) -> Choices:
        """Return the options of plans with one strategy, or with its counterparts where it does not fit."""
        return self._options.uniform(outline.pipeline, outline.rows)

    def layers(self, strategies: tuple[Strategy, ...]) -> Groups:
        """Return the strategies of all layers in a plan with one strategy, as `Plan.layers`."""
        if len({*strategies}) == 1:
            return (("*", strategies[0]),)
        pairs = zip(self.sections.sections, strategies, strict=True)
        return tuple((f"{section.blocks[0]}-{section.blocks[-1]}", strategy) for section, strategy in pairs)

    def machine(self, outline: PlanOutline, budget: float) -> Machine:
        """Return the cluster's rates and memory as the bounds of an outline need them."""
        costs, config, pipeline = self.costs, self.space.config, outline.pipeline
        overlap = costs.hardware.overlap
        tokens = outline.rows * min(self.sections.takes[:-1]) * costs.precision.compute.itemsize
        return Machine(
            overhead=costs.model.microbatch,
            action=costs.model.microbatch / 2 + costs.hardware.pipeline,
            norm=norm_seconds(costs, self.space.ranks) + costs.teacher_seconds(outline.batch_size, self.space.ranks),
            overlap=(overlap.compute, overlap.communication) if overlap else (1.0, 1.0),
            hops=lambda share: self._hops(pipeline, share * tokens),
            # Bounds sum the same bytes in another order than prices do: a plan that just fits must not be ruled out.
            budget=(1 + ROUNDING) * (budget - costs.hardware.reserved_bytes - costs.teacher_bytes(self.space.ranks)),
            images=outline.batch_size * config.input.bytes(costs.precision.compute.itemsize),
            tokens=tokens * costs.passes_gradients,
        )

    def _hops(self, pipeline: Plan, size: float) -> Hops:
        """Return the seconds of messages of `size` bytes between the stages of a pipeline, which is outermost."""
        # With frozen layers below, some stages neither send gradients nor receive them.
        if pipeline.pipeline_degree == 1 or not self.costs.passes_gradients:
            return Hops((0.0,) * (pipeline.num_stages - 1))
        return hop_seconds(pipeline, self.costs, self.space.ranks // pipeline.pipeline_degree, size)

    def moves(self, outline: PlanOutline) -> Moves:
        """Return the function of the seconds of redistribution between two blocks in plans of an outline."""
        pipeline, costs = outline.pipeline, self.costs
        where = PlacedStrategy(pp=pipeline.pipeline_degree, splits=pipeline.splits_backward)

        def moves(elements: int, strategies: tuple[Strategy, ...]) -> Array:
            stage, layouts = costs.position(strategies[0], where).groups.stage, tuple(map(token_layout_key, strategies))
            if layouts not in self._shares:
                self._shares[layouts] = received_shares([token_layout(strategy) for strategy in strategies])
            shares, whole = self._shares[layouts], outline.rows * elements * costs.precision.compute.itemsize
            sizes, places = np.unique(shares, return_inverse=True)
            seconds = np.array([exchange_seconds(costs.links, stage, size * whole) if size else 0.0 for size in sizes])
            there = seconds[places].reshape(shares.shape)
            # Below the lowest trained layer nothing comes back.
            return there + there.T * costs.passes_gradients

        return moves

    def _ideal(self, outline: PlanOutline) -> float:
        """Return seconds per image with the fastest computing for every layer, no communication and no memory limit."""
        works = self._options.least_work(outline.pipeline, outline.rows)
        work = sum(number * each for number, each in zip(self.sections.counts.tolist(), works, strict=True) if each)
        sizes = [len(blocks) for blocks in split_blocks(self.sections.depth, outline.pipeline.num_stages, "even")]
        share = self.sections.least_share(sizes, works)
        return ideal_seconds(outline, work, share, self.machine(outline, math.inf)) / outline.batch_size

    def _bound(self, outline: PlanOutline, budget: float, limit: float, quick: bool) -> float:
        """Return a lower bound on the seconds per image of all plans of an outline; infinite if none fits into memory.

        limit: value of the bound that is high enough; tightening stops there
        quick: whether to skip the relaxation over mixes
        """
        machine, enough = self.machine(outline, budget), limit * outline.batch_size
        steps = 0 if quick else STEPS
        seconds = least_seconds(outline, self.options(outline), self.sections, machine, steps=steps, enough=enough)
        return seconds / outline.batch_size

    @property
    def sections(self) -> Sections:
        return self.space.sections
