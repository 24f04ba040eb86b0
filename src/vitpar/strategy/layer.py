"""The strategy of one layer: which role every mesh axis plays in it, and the flags that say how.

Words: an *axis* is a mesh axis, a *dim* is a tensor dim. The constructors refuse (StrategyError) any field that is
wrong by itself or beside the others here; what only shows beside a model or a batch is the matter of
`vitpar.strategy.validate`.
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
CHECKPOINT_POLICIES = ("full", "selective")


@dataclass(frozen=True)
class Axis:
    """One mesh axis: `role` and `degree` (its number of ranks; None = open, takes what is left of the world size)."""

    role: Role
    degree: int | None

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise StrategyError(
                f"unknown role '{shown(self.role)}': roles are {', '.join(ROLES)}{nearest(self.role, ROLES)}"
            )
        if self.degree is not None and not 1 <= self.degree <= MAX_RANKS:
            raise StrategyError(f"the degree of '{self.role}' is {shown(self.degree)}: use 1 to {MAX_RANKS:,}")

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
    tensor_mode: one of TENSOR_MODES, how tp splits matrices. depth: of 2.5d, None for the least above 1 that fits.
    sequence_parallel: between the matrix products, ranks along tp hold unlike samples instead of copies.
    zero: what dp shards, as in ZeRO: 0 nothing, 1 optimizer state, 2 gradients too.
    checkpoint: activation checkpointing policy, None for none. offload: parameters, gradients and optimizer state live
    in host memory.
    """

    axes: tuple[Axis, ...] = ()
    tensor_mode: str = "1d"
    depth: int | None = None
    sequence_parallel: bool = False
    zero: int = 0
    checkpoint: str | None = None
    offload: bool = False

    def __post_init__(self) -> None:
        self._check_axes()
        refuse_many_ranks(self.known_size, self)
        self._check_choices()
        self._check_tensor_mode()
        if self.zero and not self.has("dp"):
            raise StrategyError(f"+zero{self.zero} shards over dp, which '{self}' lacks: add an axis such as dp2")
        if self.zero and self.has("fsdp"):
            raise StrategyError(
                f"+zero{self.zero} clashes with fsdp in '{self}': leave out +zero{self.zero}, fsdp shards more already"
            )

    def _check_axes(self) -> None:
        roles = [axis.role for axis in self.axes]
        for axis in self.axes:
            if axis.role == "pp":
                raise StrategyError(f"'{axis}' is in a layer's strategy: set the pipeline degree with the plan's pp")
            if axis.degree == 1:
                raise StrategyError(f"'{axis}' has degree 1: leave the axis out")
            if roles.count(axis.role) > 1:
                raise StrategyError(f"role '{axis.role}' is repeated in a strategy: give each role once")

    def _check_choices(self) -> None:
        for what, value, known in (
            ("tensor mode", self.tensor_mode, TENSOR_MODES),
            ("checkpoint policy", self.checkpoint or CHECKPOINT_POLICIES[0], CHECKPOINT_POLICIES),
        ):
            if value not in known:
                plural = {"tensor mode": "tensor modes", "checkpoint policy": "policies"}[what]
                raise StrategyError(
                    f"unknown {what} '{shown(value)}': {plural} are {', '.join(known)}{nearest(value, known)}"
                )
        if self.zero not in (0, 1, 2):
            raise StrategyError(f"zero is {shown(self.zero)}: use 0, 1 or 2, or the role fsdp for ZeRO-3")

    def _check_tensor_mode(self) -> None:
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
        if self.tensor_mode != "1d" and self.degree_or_open("tp") is not None:
            _ = self.tensor_shape

    def has(self, role: Role) -> bool:
        """Whether the strategy names `role`, with a degree above 1 or an open one."""
        return any(axis.role == role for axis in self.axes)

    def degree_or_open(self, role: Role) -> int | None:
        """The degree of `role`: 1 where the strategy does not name it, None where it is open."""
        return next((axis.degree for axis in self.axes if axis.role == role), 1)

    def degree(self, role: Role) -> int:
        """The degree of `role`, 1 where the strategy does not name it. Raises StrategyError where it is open."""
        return next((axis.size for axis in self.axes if axis.role == role), 1)

    @property
    def size(self) -> int:
        """Ranks of the stage: the product of the degrees."""
        return math.prod(axis.size for axis in self.axes)

    @property
    def known_size(self) -> int:
        """The product of the degrees that are known."""
        return math.prod(axis.degree for axis in self.axes if axis.degree is not None)

    @property
    def is_open(self) -> bool:
        """Whether a degree is open."""
        return any(axis.degree is None for axis in self.axes)

    @property
    def tensor_flag(self) -> str:
        """The flag that needs tp: `+2d`, `+2.5d@2`, `+sp`, or nothing."""
        if self.tensor_mode != "1d":
            return f"+{self.tensor_mode}" + (f"@{self.depth}" if self.depth else "")
        return "+sp" if self.sequence_parallel else ""

    @property
    def tensor_shape(self) -> tuple[tuple[str, int], ...]:
        """How the tp ranks are arranged, outermost first: 1d (j), 2d (i, j), 2.5d (d, i, j), 3d (i, j, k).

        The names are those of the table in ``vitpar.parallel.tensor``. Raises StrategyError when tp cannot be arranged
        so.
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
        """Into how many parts this layer's batch is split wherever it is split least: dp × fsdp, and the rows (2d,
        3d) and depths (2.5d) of the tensor modes."""
        inside = math.prod(size for name, size in self.tensor_shape if name in ("d", "i"))
        return self.degree("dp") * self.degree("fsdp") * inside

    @property
    def flags(self) -> str:
        """All flags in canonical order: `+2.5d@2+zero1+ckpt.selective+offload`, or nothing."""
        flags = self.tensor_flag
        if self.zero:
            flags += f"+zero{self.zero}"
        if self.checkpoint:
            flags += "+ckpt" if self.checkpoint == CHECKPOINT_POLICIES[0] else f"+ckpt.{self.checkpoint}"
        return flags + ("+offload" if self.offload else "")

    def __str__(self) -> str:
        """The canonical string; one rank without axes is `dp1`."""
        return "x".join(map(str, self.axes or (Axis("dp", 1),))) + self.flags


def refuse_many_ranks(number: int, what: object) -> None:
    """Raise StrategyError unless there can be so many ranks. what: takes them."""
    if number > MAX_RANKS:
        raise StrategyError(f"{shown(what)} takes {shown(f'{number:,}')} ranks: use at most {MAX_RANKS:,}")


def _root(number: int, power: int) -> int | None:
    """The whole root of `number`, 2 or more, None where there is none."""
    root = round(number ** (1 / power))
    return root if root >= 2 and root**power == number else None


def _either_power(number: int, power: int) -> str:
    """`tp4 or tp9`: the powers around `number`, of 2 at least."""
    below = max(2, int(number ** (1 / power)))
    return f"tp{below**power} or tp{(below + 1) ** power}"
