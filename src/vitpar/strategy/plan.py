"""Strategies and plans as frozen objects: which role every mesh axis plays, layer by layer.

Words: an *axis* is a mesh axis, a *dim* is a tensor dim. A *strategy* gives the roles and degrees of one layer on the
ranks of its pipeline stage. A *plan* is the pipeline split, the schedule, the micro-batches and a strategy per layer.
This package is pure Python; it never imports torch.

The constructors refuse (StrategyError) any field that is wrong by itself, so such a plan never exists. What only shows
beside other fields, a model or a batch is the matter of `vitpar.strategy.validate`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from vitpar.errors import StrategyError, nearest
from vitpar.strategy.unbuilt import refuse_unbuilt
from vitpar.strategy.words import count

Role = Literal["pp", "dp", "fsdp", "tp"]
ROLES: tuple[Role, ...] = ("pp", "dp", "fsdp", "tp")
CHECKPOINT_POLICIES = ("full",)
SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b")
SPLITS = ("even", "balanced")


@dataclass(frozen=True)
class Axis:
    """One mesh axis: `role` and `degree` (its number of ranks; None = open, takes what is left of the world size)."""

    role: Role
    degree: int | None

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise StrategyError(f"unknown role '{self.role}': roles are {', '.join(ROLES)}{nearest(self.role, ROLES)}")
        if self.degree is not None and self.degree < 1:
            raise StrategyError(f"the degree of '{self.role}' is {self.degree}: use 1 or more")

    @property
    def size(self) -> int:
        """The degree, once it is known."""
        if self.degree is None:
            raise StrategyError(f"the degree of '{self.role}' is open: give it a number or resolve it for a world size")
        return self.degree

    def __str__(self) -> str:
        return self.role if self.degree is None else f"{self.role}{self.degree}"


@dataclass(frozen=True)
class Strategy:
    """Roles of one layer on the ranks of its stage.

    axes: outermost (slowest-varying rank) first, without pp, each role at most once, degrees of 1 left out.
    checkpoint: activation checkpointing policy, None for none.
    """

    axes: tuple[Axis, ...] = ()
    checkpoint: str | None = None

    def __post_init__(self) -> None:
        roles = [axis.role for axis in self.axes]
        for axis in self.axes:
            if axis.role == "pp":
                raise StrategyError(f"'{axis}' stands in a layer's strategy: give the pipeline degree as the plan's pp")
            if axis.degree == 1:
                raise StrategyError(f"'{axis}' stands in a strategy: leave out axes of degree 1")
            if roles.count(axis.role) > 1:
                raise StrategyError(f"role '{axis.role}' stands twice in a strategy: give each role once")
        if self.checkpoint is not None and self.checkpoint not in CHECKPOINT_POLICIES:
            refuse_unbuilt(f"+ckpt.{self.checkpoint}")
            raise StrategyError(
                f"unknown checkpoint policy '{self.checkpoint}': policies are {', '.join(CHECKPOINT_POLICIES)}"
                f"{nearest(self.checkpoint, CHECKPOINT_POLICIES)}"
            )

    def degree(self, role: Role) -> int:
        """The degree of `role`, 1 where the strategy does not name it."""
        return next((axis.size for axis in self.axes if axis.role == role), 1)

    @property
    def size(self) -> int:
        """Ranks of the stage: the product of the degrees."""
        return math.prod(axis.size for axis in self.axes)

    @property
    def data_parallel(self) -> int:
        """Into how many parts this layer's batch is split: dp × fsdp."""
        return self.degree("dp") * self.degree("fsdp")


@dataclass(frozen=True)
class Plan:
    """A complete plan.

    layers: (selector, strategy) pairs; a uniform plan has the one pair ("*", strategy).
    pp: pipeline degree, None = open. pp_index: how many of a uniform strategy's axes are outer to pp in the rank order.
    schedule: one of SCHEDULES. virtual_stages: stages a rank holds (interleaved schedules).
    microbatches: per step; None = one without pp, else `default_microbatches`. microbatch_size: the other way to say
    it, images per data-parallel part; at most one of the two is given.
    split: how blocks are dealt to stages: "even", "balanced" (by cost) or the blocks of each stage.
    """

    layers: tuple[tuple[str, Strategy], ...] = (("*", Strategy()),)
    pp: int | None = 1
    pp_index: int = 0
    schedule: str = "1f1b"
    virtual_stages: int = 1
    microbatches: int | None = None
    microbatch_size: int | None = None
    split: str | tuple[int, ...] = "even"

    def __post_init__(self) -> None:
        selectors = [selector for selector, _ in self.layers]
        if selectors != ["*"]:
            refuse_unbuilt("layerwise plans", f" (layers {', '.join(selectors) or 'none'})")
        Axis("pp", self.pp)
        outermost = 0 if self.pp == 1 else len(self.strategy.axes)
        if not 0 <= self.pp_index <= outermost:
            raise StrategyError(
                f"pp_index is {self.pp_index} but pp has {outermost} axes to stand behind: use 0 to {outermost}"
            )
        for name in ("virtual_stages", "microbatches", "microbatch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise StrategyError(f"{name} is {value}: use 1 or more")
        if self.schedule not in SCHEDULES:
            raise StrategyError(
                f"unknown schedule '{self.schedule}': schedules are {', '.join(SCHEDULES)}"
                f"{nearest(self.schedule, SCHEDULES)}"
            )
        if isinstance(self.split, str) and self.split not in SPLITS:
            raise StrategyError(
                f"unknown split '{self.split}': use {', '.join(SPLITS)} or the blocks of each stage"
                f"{nearest(self.split, SPLITS)}"
            )

    @property
    def strategy(self) -> Strategy:
        """The one strategy of a uniform plan."""
        assert len(self.layers) == 1, "a layerwise plan has no single strategy"
        return self.layers[0][1]

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Every axis of a uniform plan including pp, outermost first, degrees of 1 left out."""
        axes = list(self.strategy.axes)
        if self.pp != 1:
            axes.insert(self.pp_index, Axis("pp", self.pp))
        return tuple(axes)

    @property
    def pipeline_degree(self) -> int:
        """Ranks along pp."""
        return Axis("pp", self.pp).size

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return math.prod(axis.size for axis in self.axes)

    @property
    def num_stages(self) -> int:
        """Pipeline stages: pipeline degree × virtual stages."""
        return self.pipeline_degree * self.virtual_stages

    def with_axes(self, axes: tuple[Axis, ...]) -> Plan:
        """The same uniform plan on other axes, which may include pp and degrees of 1, outermost first."""
        kept = [axis for axis in axes if axis.degree != 1]
        roles = [axis.role for axis in kept]
        pp_index = roles.index("pp") if "pp" in roles else 0
        pp = kept.pop(pp_index).degree if "pp" in roles else 1
        return replace(self, layers=(("*", replace(self.strategy, axes=tuple(kept))),), pp=pp, pp_index=pp_index)

    def resolve(self, world_size: int) -> Plan:
        """The same plan with its open degree, if any, taking what is left of `world_size` ranks.

        Raises StrategyError when the product of the degrees does not match `world_size`.
        """
        assert world_size >= 1, f"a world has at least one rank, not {world_size}"
        known = math.prod(axis.degree for axis in self.axes if axis.degree is not None)
        if all(axis.degree is not None for axis in self.axes):
            if known != world_size:
                raise StrategyError(
                    f"'{self}' needs {count(known, 'rank')} but the world has {world_size}: "
                    f"start {known}, or leave one degree open as in '{self._opened()}'"
                )
            return self
        left, rest = divmod(world_size, known)
        if rest:
            raise StrategyError(
                f"the degrees given in '{self}' multiply to {known}, which does not divide "
                f"{count(world_size, 'rank')}: choose degrees whose product divides {world_size}"
            )
        return self.with_axes(tuple(Axis(a.role, left if a.degree is None else a.degree) for a in self.axes))

    def _opened(self) -> str:
        """An example for a message: the plan's string with its last degree left open."""
        open_axes = (*self.axes[:-1], Axis(self.axes[-1].role if self.axes else "dp", None))
        return str(self.with_axes(open_axes))

    def __str__(self) -> str:
        """The canonical strategy string; parsing it gives the same axes and flags."""
        from vitpar.strategy.grammar import format_plan

        return format_plan(self)
