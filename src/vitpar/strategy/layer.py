"""Parallelism strategy of one layer: the role of each mesh axis, and flags.

An *axis* is a mesh axis, a *dim* a tensor dimension. The constructors raise StrategyError if a field is wrong by itself
or in combination with the others. `vitpar.strategy.validate` checks a strategy against a model and a batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from vitpar.errors import StrategyError
from vitpar.limits import MAX_RANKS
from vitpar.text import divisors, either, nearest, shown

Role = Literal["pp", "dp", "fsdp", "tp"]
ROLES: tuple[Role, ...] = ("pp", "dp", "fsdp", "tp")
TENSOR_MODES = ("1d", "2d", "2.5d", "3d")
"""Ways in which tp splits matrices; 1d is Megatron's."""
CHECKPOINT_POLICIES = ("full", "selective")
"""Activation checkpointing policies; the first is the default of +ckpt."""


@dataclass(frozen=True)
class Axis:
    """One mesh axis."""

    role: Role
    """Kind of parallelism along the axis."""
    degree: int | None
    """Number of ranks; None is open: the rest of the world size."""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise StrategyError(
                f"unknown role '{shown(self.role)}': roles are {', '.join(ROLES)}{nearest(self.role, ROLES)}"
            )
        if self.degree is not None and not 1 <= self.degree <= MAX_RANKS:
            raise StrategyError(f"the degree of '{self.role}' is {shown(self.degree)}: use 1 to {MAX_RANKS:,}")

    @property
    def size(self) -> int:
        """Number of ranks. Raises StrategyError if the degree is open."""
        if self.degree is None:
            raise StrategyError(f"the degree of '{self.role}' is open: give it a number or resolve it for a world size")
        return self.degree

    def __str__(self) -> str:
        return self.role if self.degree is None else f"{self.role}{self.degree}"


@dataclass(frozen=True)
class Strategy:
    """Parallelism of one layer over the ranks of its stage."""

    axes: tuple[Axis, ...] = ()
    """Mesh axes, outermost (slowest-varying rank) first, without pp; each role at most once, no degree of 1."""
    tensor_mode: str = "1d"
    """How tp splits matrices, one of TENSOR_MODES."""
    depth: int | None = None
    """Depth of 2.5d; None for the smallest above 1 that fits."""
    sequence_parallel: bool = False
    """Whether ranks along tp hold different samples, not copies, between the matrix products."""
    zero: int = 0
    """ZeRO stage of dp: 0 shards nothing, 1 optimizer state, 2 gradients too."""
    checkpoint: str | None = None
    """Activation checkpointing policy, one of CHECKPOINT_POLICIES; None for no checkpointing."""
    offload: bool = False
    """Whether parameters, gradients and optimizer state are kept in host memory."""

    def __post_init__(self) -> None:
        self._check_axes()
        refuse_many_ranks(self.known_size, self)
        for what, value, known in (
            ("tensor mode", self.tensor_mode, TENSOR_MODES),
            ("checkpoint policy", self.checkpoint, (None, *CHECKPOINT_POLICIES)),
            ("stage of zero", self.zero, (0, 1, 2)),
        ):
            if value not in known:
                raise StrategyError(f"unknown {what} '{shown(value)}': use {', '.join(map(str, known))}")
        self._check_tensor_mode()
        if self.zero and not self.has("dp"):
            raise StrategyError(f"+zero{self.zero} shards over dp, which '{self}' lacks: add an axis such as dp2")
        if self.zero and self.has("fsdp"):
            raise StrategyError(
                f"+zero{self.zero} clashes with fsdp in '{self}': leave out +zero{self.zero}, fsdp shards more already"
            )

    def _check_axes(self) -> None:
        """Raise StrategyError for pp, a degree of 1, or a repeated role."""
        roles = [axis.role for axis in self.axes]
        for axis in self.axes:
            if axis.role == "pp":
                raise StrategyError(f"'{axis}' is in a layer's strategy: set the pipeline degree with the plan's pp")
            if axis.degree == 1:
                raise StrategyError(f"'{axis}' has degree 1: leave the axis out")
            if roles.count(axis.role) > 1:
                raise StrategyError(f"role '{axis.role}' is repeated in a strategy: give each role once")

    def _check_tensor_mode(self) -> None:
        """Raise StrategyError if the tensor mode, its depth, +sp and the degree of tp do not fit each other."""
        flag = self.tensor_flag
        if flag and not self.has("tp"):
            raise StrategyError(f"{flag} splits over tp, which '{self}' lacks: add an axis such as tp4")
        if self.sequence_parallel and self.tensor_mode != "1d":
            raise StrategyError(
                f"+sp clashes with +{self.tensor_mode} in '{self}': leave out +sp, {self.tensor_mode} splits "
                "activations everywhere already"
            )
        if self.depth is not None and self.tensor_mode != "2.5d":
            raise StrategyError(
                f"depth {shown(self.depth)} is given with tensor mode {self.tensor_mode}: only 2.5d has a depth"
            )
        if self.depth is not None and self.depth < 1:
            raise StrategyError(f"+2.5d@{shown(self.depth)} has no depth: use 1 or more")
        if self.tensor_mode != "1d" and Axis("tp", None) not in self.axes:
            _ = self.tensor_shape

    def has(self, role: Role) -> bool:
        """Return whether the strategy has an axis of `role`, with a degree above 1 or an open one."""
        return any(axis.role == role for axis in self.axes)

    def degree(self, role: Role) -> int:
        """Return the degree of `role`, 1 without such an axis. Raises StrategyError if it is open."""
        return next((axis.size for axis in self.axes if axis.role == role), 1)

    @property
    def size(self) -> int:
        """Number of ranks of the stage: the product of the degrees. Raises StrategyError if one is open."""
        return math.prod(axis.size for axis in self.axes)

    @property
    def known_size(self) -> int:
        """Product of the degrees that are not open."""
        return math.prod(axis.degree for axis in self.axes if axis.degree is not None)

    @property
    def is_open(self) -> bool:
        """Whether a degree is open."""
        return any(axis.degree is None for axis in self.axes)

    @property
    def tensor_flag(self) -> str:
        """Flag of the tensor parallelism: `+2d`, `+2.5d@2`, `+sp`, or empty."""
        if self.tensor_mode != "1d":
            return f"+{self.tensor_mode}" + (f"@{self.depth}" if self.depth else "")
        return "+sp" if self.sequence_parallel else ""

    @property
    def mode(self) -> str:
        """Tensor-parallel mode of ``vitpar.models.roles``, with +sp as one of its own."""
        return "sp" if self.sequence_parallel else self.tensor_mode

    @property
    def tensor_shape(self) -> tuple[tuple[str, int], ...]:
        """Mesh axes of the tp ranks with their sizes, outermost first: 1d (j), 2d (i, j), 2.5d (d, i, j), 3d (i, j, k).

        The table in ``vitpar.models.roles`` explains the names. Raises StrategyError if the degree of tp does not
        fit the mode.
        """
        tp = self.degree("tp")
        if self.tensor_mode == "2d":
            q = _root(tp, 2)
            if q is None:
                raise StrategyError(f"+2d needs tp to be a square, not {tp}: use {_either_power(tp, 2)}")
            return (("i", q), ("j", q))
        if self.tensor_mode == "2.5d":
            depths = [d for d in divisors(tp) if _root(tp // d, 2)]
            if not depths:
                raise StrategyError(f"+2.5d needs tp to be a depth times a square, not {tp}: use tp8 or tp4")
            if self.depth is not None and self.depth not in depths:
                depth, fix = shown(self.depth), f"use a depth of {either(depths)}"
                raise StrategyError(f"+2.5d@{depth} needs tp to be {depth} times a square, not {tp}: {fix}")
            d = self.depth or next((d for d in depths if d > 1), 1)
            q = _root(tp // d, 2) or 1
            return (("d", d), ("i", q), ("j", q))
        if self.tensor_mode == "3d":
            q = _root(tp, 3)
            if q is None:
                raise StrategyError(f"+3d needs tp to be a cube, not {tp}: use {_either_power(tp, 3)}")
            return (("i", q), ("j", q), ("k", q))
        return (("j", tp),)

    @property
    def data_parallel(self) -> int:
        """Number of parts of this layer's batch where it is split least: dp × fsdp × axes i and d of the tensor mode.

        Other axes (+sp, j of 3d) split it further within the layer: see ``vitpar.strategy.layout.row_parts``.
        """
        inside = math.prod(size for name, size in self.tensor_shape if name in ("d", "i"))
        return self.degree("dp") * self.degree("fsdp") * inside

    @property
    def flags(self) -> str:
        """All flags in canonical order, as in `+2.5d@2+zero1+ckpt.selective+offload`, or empty."""
        flags = self.tensor_flag
        if self.zero:
            flags += f"+zero{self.zero}"
        if self.checkpoint:
            flags += "+ckpt" if self.checkpoint == CHECKPOINT_POLICIES[0] else f"+ckpt.{self.checkpoint}"
        return flags + ("+offload" if self.offload else "")

    def __str__(self) -> str:
        """Return the canonical string; without axes it is `dp1`."""
        return "x".join(map(str, self.axes or (Axis("dp", 1),))) + self.flags

    def __repr__(self) -> str:
        return f"Strategy({str(self)!r})"


def refuse_many_ranks(number: int, what: object) -> None:
    """Raise StrategyError if `number` exceeds MAX_RANKS. what: whatever needs the ranks, for the message."""
    if number > MAX_RANKS:
        raise StrategyError(f"{shown(what)} takes {shown(f'{number:,}')} ranks: use at most {MAX_RANKS:,}")


def _root(number: int, power: int) -> int | None:
    """Return the integer root of `number` if there is one of 2 or more, else None."""
    # The floating-point root is only a guess, verified in integers.
    root = round(number ** (1 / power))
    return root if root >= 2 and root**power == number else None


def _either_power(number: int, power: int) -> str:
    """Return the degrees around `number` that are powers of integers from 2, as in `tp4 or tp9`."""
    below = max(2, int(number ** (1 / power)))
    return f"tp{below**power} or tp{(below + 1) ** power}"
