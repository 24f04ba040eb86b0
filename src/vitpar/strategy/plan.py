"""Parallelism plans as frozen objects: a strategy per layer, the pipeline, its schedule and the micro-batches.

A *strategy* (`vitpar.strategy.layer`) gives the roles and degrees of one layer on the ranks of its pipeline stage. The
constructor raises StrategyError if a field is wrong by itself. `vitpar.strategy.validate` checks fields against each
other, a model and a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vitpar.errors import StrategyError
from vitpar.limits import MAX_BATCH_SIZE, MAX_BLOCKS
from vitpar.strategy.layer import Axis, Strategy, refuse_many_ranks
from vitpar.strategy.schedules import SCHEDULES
from vitpar.strategy.selectors import WORDS, Groups, blocks_of, canonical
from vitpar.text import count, nearest, short_repr, shown

SPLITS = ("even", "balanced")
"""Names of ways to split blocks into stages (`vitpar.strategy.stages.split_blocks`)."""
_COUNTS = {"virtual_stages": MAX_BLOCKS, "microbatches": MAX_BATCH_SIZE, "microbatch_size": MAX_BATCH_SIZE}
"""Upper limits of fields."""


@dataclass(frozen=True)
class Plan:
    """A complete parallelism plan."""

    layers: Groups = (("*", Strategy()),)
    """(selector, strategy) pairs in canonical order (`vitpar.strategy.selectors`); a uniform plan has only
    ("*", strategy)."""
    pp: int | None = 1
    """Pipeline degree; None is open: the rest of the world size."""
    pp_index: int = 0
    """Number of axes outside pp in the rank order of a uniform plan. In a layerwise plan pp is the outermost axis."""
    schedule: str = "1f1b"
    """Pipeline schedule, a name in SCHEDULES."""
    virtual_stages: int = 1
    """Stages per rank; more than 1 under interleaved and V-shaped schedules."""
    microbatches: int | None = None
    """Micro-batches per step; None for 1 without pp, else about 2 · pp (`vitpar.strategy.batch`)."""
    microbatch_size: int | None = None
    """Images of a micro-batch per data-parallel part; only one of this and `microbatches` can be given."""
    split: str | tuple[int, ...] = "even"
    """Split of the blocks into stages: "even", "balanced" (by cost), or the number of blocks of each stage."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", canonical(self.layers))
        self._check_layers()
        Axis("pp", self.pp)
        refuse_many_ranks((self.pp or 1) * max(strategy.known_size for strategy in self.distinct), self)
        outermost = len(self.strategy.axes) if self.is_uniform and self.pp != 1 else 0
        if not 0 <= self.pp_index <= outermost:
            raise StrategyError(
                f"pp_index is {shown(self.pp_index)} but pp can follow at most {outermost} axes: use 0 to {outermost}"
            )
        for name, most in _COUNTS.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise StrategyError(f"{name} is {shown(value)}: use 1 to {most:,}")
        if self.schedule not in SCHEDULES:
            raise StrategyError(
                f"unknown schedule '{shown(self.schedule)}': schedules are {', '.join(SCHEDULES)}"
                f"{nearest(self.schedule, SCHEDULES)}"
            )
        if isinstance(self.split, str) and self.split not in SPLITS:
            raise StrategyError(
                f"unknown split '{shown(self.split)}': use {', '.join(SPLITS)} or the blocks of each stage"
                f"{nearest(self.split, SPLITS)}"
            )
        if not isinstance(self.split, str) and len(self.split) > MAX_BLOCKS:
            raise StrategyError(f"split has {len(self.split):,} stages: use at most {MAX_BLOCKS:,}")

    def _check_layers(self) -> None:
        """Raise StrategyError if no block has a strategy, or strategies take different numbers of ranks."""
        if {selector for selector, _ in self.layers} <= {"embed", "head"}:
            named = shown(", ".join(selector for selector, _ in self.layers)) or "none"
            raise StrategyError(f"no block has a strategy (layers named: {named}): add a group such as *=dp2")
        if self.is_uniform:
            return
        if self.pp is None and any(strategy.is_open for _, strategy in self.layers):
            raise StrategyError("both pp and a degree of a layer are open: give one of them a number")
        sizes = {strategy.size: f"{selector}={strategy}" for selector, strategy in self.layers if not strategy.is_open}
        if len(sizes) > 1:
            (first, one), (second, other), *_ = sizes.items()
            raise StrategyError(
                f"'{one}' takes {count(first, 'rank')} of a stage but '{other}' takes {second}: "
                "give all layers strategies of the same size"
            )

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule computes gradients of inputs and of weights in separate passes."""
        return self.pp != 1 and SCHEDULES[self.schedule].splits_backward

    @property
    def is_uniform(self) -> bool:
        """Whether all layers have one strategy."""
        return len(self.layers) == 1 and self.layers[0][0] == "*"

    @property
    def strategy(self) -> Strategy:
        """The one strategy of a uniform plan."""
        assert self.is_uniform, "a layerwise plan has no single strategy"
        return self.layers[0][1]

    @property
    def distinct(self) -> tuple[Strategy, ...]:
        """The distinct strategies, in the order of layers."""
        return tuple(dict.fromkeys(strategy for _, strategy in self.layers))

    def strategies(self, layer_names: Sequence[str]) -> dict[str, Strategy]:
        """Return the strategy of every layer by name, in the order of `layer_names` (``ModelConfig.layer_names``).

        Without `*`, embed or head that is not named takes the strategy of its neighbouring block. Raises StrategyError
        if a block has no strategy, or the plan names a block that the model lacks.
        """
        words = {selector: strategy for selector, strategy in self.layers if blocks_of(selector) is None}
        if name := next((selector for selector in words if selector not in WORDS), None):
            raise StrategyError(f"only a model says which blocks '{name}' names: validate the plan for the model")
        depth = len(layer_names) - 2
        by_block: dict[int, Strategy] = {}
        for selector, strategy in self.layers:
            span = blocks_of(selector) or range(0)
            if span.stop > depth:
                raise StrategyError(
                    f"blocks {selector} are given a strategy but the model has {count(depth, 'block')}, "
                    f"0 to {depth - 1}: change the group"
                )
            by_block |= dict.fromkeys(span, strategy)
        missing = [index for index in range(depth) if index not in by_block]
        if missing and "*" not in words:
            raise StrategyError(
                f"block {missing[0]} has no strategy: add a group such as *=dp2 for all that are not named"
            )
        blocks = [by_block.get(index, words.get("*")) for index in range(depth)]
        embed = words.get("embed", words.get("*", blocks[0]))
        head = words.get("head", words.get("*", blocks[-1]))
        chosen = [embed, *blocks, head]
        return {name: strategy for name, strategy in zip(layer_names, chosen, strict=True) if strategy is not None}

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Axes of a uniform plan including pp, outermost first, without degrees of 1."""
        axes = list(self.strategy.axes)
        if self.pp != 1:
            axes.insert(self.pp_index, Axis("pp", self.pp))
        return tuple(axes)

    @property
    def is_open(self) -> bool:
        """Whether a degree is open."""
        return self.pp is None or any(strategy.is_open for strategy in self.distinct)

    @property
    def pipeline_degree(self) -> int:
        """Number of ranks along pp. Raises StrategyError if it is open."""
        return Axis("pp", self.pp).size

    @property
    def stage_size(self) -> int:
        """Number of ranks of a stage."""
        return max(strategy.size for strategy in self.distinct)

    @property
    def world_size(self) -> int:
        """Number of ranks of the plan."""
        return self.pipeline_degree * self.stage_size

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages: pipeline degree × virtual stages."""
        return self.pipeline_degree * self.virtual_stages

    @property
    def data_parallel(self) -> int:
        """Number of data-parallel parts of the batch: the least common multiple of the layers' numbers of parts."""
        return math.lcm(*(strategy.data_parallel for strategy in self.distinct))

    def resolve(self, world_size: int) -> Plan:
        """Return the plan with its open degree, if any, set to what remains of `world_size` ranks.

        Raises StrategyError if the product of the degrees does not match `world_size`.
        """
        assert world_size >= 1, f"the world size is {world_size}: use at least 1"
        refuse_many_ranks(world_size, "the world")
        if not self.is_open:
            if self.world_size != world_size:
                raise StrategyError(
                    f"'{shown(self)}' needs {count(self.world_size, 'rank')} but the world has {world_size}: "
                    f"start {self.world_size}, or leave one degree open"
                )
            return self
        if self.is_uniform:
            known = math.prod(axis.degree for axis in self.axes if axis.degree is not None)
            left = self._left(world_size, known)
            filled, pp, pp_index = without_pp(_filled(self.axes, left))
            return replace(self, layers=(("*", replace(self.strategy, axes=filled)),), pp=pp, pp_index=pp_index)
        if self.pp is None:
            return replace(self, pp=self._left(world_size, self.stage_size))
        stage = self._left(world_size, self.pp)
        layers = []
        for selector, strategy in self.layers:
            rest = self._left(stage, strategy.known_size) if strategy.is_open else 1
            layers.append((selector, replace(strategy, axes=_filled(strategy.axes, rest))))
        return replace(self, layers=tuple(layers)).resolve(world_size)

    def _left(self, ranks: int, known: int) -> int:
        """Return the open degree: `ranks` divided by the product `known` of the other degrees."""
        left, rest = divmod(ranks, known)
        if rest:
            raise StrategyError(
                f"the degrees given in '{shown(self)}' multiply to {known}, which does not divide "
                f"{count(ranks, 'rank')}: choose degrees whose product divides {ranks}"
            )
        return left

    def __str__(self) -> str:
        """Return the canonical strategy string; parsing it gives the same layers, axes and flags."""
        if self.is_uniform:
            return "x".join(map(str, self.axes or (Axis("dp", 1),))) + self.strategy.flags
        return f"{Axis('pp', self.pp)}: " + ", ".join(f"{selector}={strategy}" for selector, strategy in self.layers)

    def __repr__(self) -> str:
        return short_repr(self)


def _filled(axes: tuple[Axis, ...], degree: int) -> tuple[Axis, ...]:
    """Return `axes` with `degree` in place of an open one, and without degrees of 1."""
    filled = (Axis(axis.role, degree) if axis.degree is None else axis for axis in axes)
    return tuple(axis for axis in filled if axis.degree != 1)


def without_pp(axes: tuple[Axis, ...]) -> tuple[tuple[Axis, ...], int | None, int]:
    """Return axes without pp, the degree of pp, and the number of axes outside it (`Plan.pp`, `Plan.pp_index`)."""
    roles = [axis.role for axis in axes]
    if "pp" not in roles:
        return axes, 1, 0
    index = roles.index("pp")
    return (*axes[:index], *axes[index + 1 :]), axes[index].degree, index
