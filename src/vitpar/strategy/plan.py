"""Plans as frozen objects: the pipeline split, the schedule, the micro-batches and a strategy per layer.

A *strategy* (`vitpar.strategy.layer`) gives the roles and degrees of one layer on the ranks of its pipeline stage. This
package is pure Python; it never imports torch.

The constructors refuse (StrategyError) any field that is wrong by itself, so such a plan never exists. What only shows
beside other fields, a model or a batch is the matter of `vitpar.strategy.validate`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vitpar.errors import StrategyError
from vitpar.limits import MAX_BATCH_SIZE, MAX_BLOCKS, MAX_LAYOUT_PARTS
from vitpar.strategy.layer import Axis, Strategy, refuse_many_ranks
from vitpar.strategy.schedules import SCHEDULES
from vitpar.strategy.selectors import Groups, blocks_of, canonical, strategies
from vitpar.text import count, nearest, shown

SPLITS = ("even", "balanced")
_COUNTS = {"virtual_stages": MAX_BLOCKS, "microbatches": MAX_BATCH_SIZE, "microbatch_size": MAX_BATCH_SIZE}
"""The most that there can be of each."""


@dataclass(frozen=True)
class Plan:
    """A complete plan.

    layers: (selector, strategy) pairs in canonical order (`vitpar.strategy.selectors`); a uniform plan has the one pair
    ("*", strategy).
    pp: pipeline degree, None = open. pp_index: how many of a uniform strategy's axes are outer to pp in the rank order;
    in a layerwise plan pp is the outermost.
    schedule: a name in SCHEDULES. virtual_stages: stages a rank holds (interleaved and V-shaped schedules).
    microbatches: per step; None = one without pp, else `default_microbatches`. microbatch_size: the other way to say
    it, images per data-parallel part; at most one of the two is given.
    split: how blocks are dealt to stages: "even", "balanced" (by cost) or the blocks of each stage.
    """

    layers: Groups = (("*", Strategy()),)
    pp: int | None = 1
    pp_index: int = 0
    schedule: str = "1f1b"
    virtual_stages: int = 1
    microbatches: int | None = None
    microbatch_size: int | None = None
    split: str | tuple[int, ...] = "even"

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", canonical(self.layers))
        self._check_layers()
        Axis("pp", self.pp)
        refuse_many_ranks((self.pp or 1) * max(strategy.known_size for strategy in self.kinds), self)
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
        if not any(selector == "*" or blocks_of(selector) for selector, _ in self.layers):
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
        ranks, kinds = max(sizes, default=1), len(self.kinds)
        if ranks * kinds > MAX_LAYOUT_PARTS:
            raise StrategyError(
                f"stages of {ranks} ranks have {kinds} different strategies: use at most {MAX_LAYOUT_PARTS // ranks}"
            )

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed in a backward of their own."""
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
    def kinds(self) -> tuple[Strategy, ...]:
        """The different strategies, in order."""
        return tuple(dict.fromkeys(strategy for _, strategy in self.layers))

    def strategies(self, layer_names: Sequence[str]) -> dict[str, Strategy]:
        """The strategy of every layer, by name, in order (names as ``ViTConfig.layer_names`` gives them).

        Raises StrategyError when the plan names other blocks than the model has.
        """
        return strategies(self.layers, layer_names)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Every axis of a uniform plan including pp, outermost first, degrees of 1 left out."""
        axes = list(self.strategy.axes)
        if self.pp != 1:
            axes.insert(self.pp_index, Axis("pp", self.pp))
        return tuple(axes)

    @property
    def is_open(self) -> bool:
        """Whether a degree is open."""
        return self.pp is None or any(strategy.is_open for strategy in self.kinds)

    @property
    def pipeline_degree(self) -> int:
        """Ranks along pp."""
        return Axis("pp", self.pp).size

    @property
    def stage_size(self) -> int:
        """Ranks of a stage."""
        return max(strategy.size for strategy in self.kinds)

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.pipeline_degree * self.stage_size

    @property
    def num_stages(self) -> int:
        """Pipeline stages: pipeline degree × virtual stages."""
        return self.pipeline_degree * self.virtual_stages

    @property
    def data_parallel(self) -> int:
        """The least number of parts that every layer's own number of batch parts divides."""
        return math.lcm(*(strategy.data_parallel for strategy in self.kinds))

    def with_axes(self, axes: tuple[Axis, ...]) -> Plan:
        """Return the uniform plan on other axes, outermost first, which may include pp and degrees of 1."""
        kept = [axis for axis in axes if axis.degree != 1]
        roles = [axis.role for axis in kept]
        pp_index = roles.index("pp") if "pp" in roles else 0
        pp = kept.pop(pp_index).degree if "pp" in roles else 1
        return replace(self, layers=(("*", replace(self.strategy, axes=tuple(kept))),), pp=pp, pp_index=pp_index)

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
                    f"start {self.world_size}, or leave one degree open{self._opened()}"
                )
            return self
        if self.is_uniform:
            known = math.prod(axis.degree for axis in self.axes if axis.degree is not None)
            left = self._left(world_size, known)
            return self.with_axes(tuple(Axis(a.role, left if a.degree is None else a.degree) for a in self.axes))
        if self.pp is None:
            return replace(self, pp=self._left(world_size, self.stage_size))
        stage = self._left(world_size, self.pp)
        filled = []
        for selector, strategy in self.layers:
            rest = self._left(stage, strategy.known_size) if strategy.is_open else 1
            axes = (Axis(a.role, rest if a.degree is None else a.degree) for a in strategy.axes)
            filled.append((selector, replace(strategy, axes=tuple(axis for axis in axes if axis.degree != 1))))
        return replace(self, layers=tuple(filled)).resolve(world_size)

    def _left(self, ranks: int, known: int) -> int:
        left, rest = divmod(ranks, known)
        if rest:
            raise StrategyError(
                f"the degrees given in '{shown(self)}' multiply to {known}, which does not divide "
                f"{count(ranks, 'rank')}: choose degrees whose product divides {ranks}"
            )
        return left

    def _opened(self) -> str:
        """An example for a message: the plan's string with its last degree left open."""
        if not self.is_uniform:
            return ""
        open_axes = (*self.axes[:-1], Axis(self.axes[-1].role if self.axes else "dp", None))
        return f" as in '{self.with_axes(open_axes)}'"

    def __str__(self) -> str:
        """The canonical strategy string; parsing it gives the same layers, axes and flags."""
        if self.is_uniform:
            return "x".join(map(str, self.axes or (Axis("dp", 1),))) + self.strategy.flags
        return f"{Axis('pp', self.pp)}: " + ", ".join(f"{selector}={strategy}" for selector, strategy in self.layers)
