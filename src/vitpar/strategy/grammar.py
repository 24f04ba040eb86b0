"""Parser of the strategy language. `str` of a plan writes it.

    uniform := axis { "x" axis } { "+" flag }      pp2xtp2xdp2    tp2xdp    dp2xfsdp4+ckpt
    axis    := role [ degree ]                     at most one axis leaves its degree open
    role    := pp | dp | fsdp | tp                 each at most once
    flag    := 2d | 2.5d[@depth] | 3d | sp         how tp splits
             | zero1 | zero2                       what dp shards
             | ckpt[.full] | ckpt.selective | offload
    layered := "pp" [ N ] ":" group { "," group }  pp1: 0-19=dp8, 20-31=fsdp8
    group   := layers "=" uniform without pp       pp2: embed=fsdp4, 0-11=tp2xfsdp2, *=fsdp4+ckpt
    layers  := "embed" | "head" | N | N "-" M
             | NAME                                blocks that the model calls so: stage2
             | "*"                                 the layers that no group names

The leftmost axis is the outermost: its rank varies slowest, as in DeviceMesh. Case does not matter. White space is only
allowed around the signs of a layered plan.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from vitpar.errors import StrategyError
from vitpar.limits import MAX_RANKS
from vitpar.strategy.layer import CHECKPOINT_POLICIES, ROLES, TENSOR_MODES, Axis, Role, Strategy
from vitpar.strategy.plan import Plan
from vitpar.strategy.selectors import blocks_of
from vitpar.text import literal, nearest, shown

FLAGS = ("sp", "2d", "2.5d", "3d", "zero1", "zero2", "ckpt", "offload")
_ROLE_NAMED: dict[str, Role] = {role: role for role in ROLES}
_AXIS = re.compile(r"([a-z]+)(-?[0-9]{1,9})?")
_LAYERED = re.compile(r"(pp(?:[0-9]{1,9})?)\s*:")
_CHOICE = {"2d": "tensor mode", "2.5d": "tensor mode", "3d": "tensor mode", "zero1": "zero", "zero2": "zero"}
"""Flags that exclude each other: those with the same value."""


@dataclass(frozen=True)
class _Span:
    """A piece of the text with its position, for error messages."""

    text: str
    """The complete text as typed."""
    start: int
    """Index of the first character."""
    end: int
    """Index behind the last character."""

    @property
    def word(self) -> str:
        """The piece in lower case."""
        # Lower case can change the length of text outside ASCII, and with it positions. No such text is valid anyway.
        piece = self.text[self.start : self.end]
        return piece.lower() if piece.isascii() else piece

    @property
    def place(self) -> str:
        """Description of the position for messages, counted from 1."""
        return f"at position {self.start + 1} of '{shown(self.text, self.start)}'"

    @property
    def stripped(self) -> _Span:
        """The piece without surrounding white space."""
        piece = self.text[self.start : self.end]
        start = self.start + len(piece) - len(piece.lstrip())
        return _Span(self.text, start, max(start, self.start + len(piece.rstrip())))

    def part(self, start: int, end: int) -> _Span:
        """Return the piece from `start` up to `end`, both relative to the start of this one."""
        return _Span(self.text, self.start + start, self.start + end)

    def split(self, separator: str) -> list[_Span]:
        """Return the pieces between the separators, including empty ones."""
        pieces, start = [], 0
        for word in self.word.split(separator):
            pieces.append(self.part(start, start + len(word)))
            start += len(word) + len(separator)
        return pieces


def parse(text: str) -> Plan:
    """Return the plan that `text` describes, with all other fields at their defaults.

    Raises StrategyError with the position (from 1) of the mistake and how to fix it.
    """
    text = text.strip()
    whole = _Span(text, 0, len(text))
    if not text:
        raise StrategyError("the strategy is empty: write roles and degrees, as in dp2xtp2")
    if not text.isprintable():
        raise StrategyError(
            f"the strategy {literal(text)} is not a line of text: write roles and degrees, as in dp2xtp2"
        )
    if match := _LAYERED.match(whole.word):
        pipeline = _parse_axis(whole.part(*match.span(1)))
        groups = [_parse_group(piece) for piece in whole.part(match.end(), len(text)).split(",")]
        return Plan(layers=tuple(groups), pp=pipeline.degree)
    axes, flags = _parse_uniform(whole)
    roles = [axis.role for axis in axes if axis.degree != 1]
    pp = next((axis.degree for axis in axes if axis.role == "pp"), 1)
    pp_index = roles.index("pp") if "pp" in roles else 0
    return Plan(layers=(("*", _strategy(axes, flags)),), pp=pp, pp_index=pp_index)


def _parse_group(span: _Span) -> tuple[str, Strategy]:
    """Parse a group such as `0-11=tp2xfsdp2`, with optional white space around it and the sign."""
    span = span.stripped
    if not span.word:
        raise StrategyError(f"empty group {span.place}: write layers and their strategy, as in 0-11=dp2")
    selector, *rest = span.split("=")
    selector = selector.stripped
    if len(rest) != 1:
        raise StrategyError(
            f"cannot read '{shown(span.word)}' {span.place}: a group is layers=strategy, as in 0-11=dp2"
        )
    try:
        blocks_of(selector.word)
    except StrategyError as error:
        raise StrategyError(f"{error} ({selector.place})") from None
    axes, flags = _parse_uniform(rest[0].stripped)
    for axis in axes:
        if axis.role == "pp":
            raise StrategyError(
                f"'{axis}' is inside a group {span.place}: write pp once for all layers, before the ':'"
            )
    return selector.word, _strategy(axes, flags)


def _strategy(axes: tuple[Axis, ...], flags: dict[str, Any]) -> Strategy:
    """Return the strategy on `axes` without pp and degrees of 1. flags: fields of Strategy."""
    kept = tuple(axis for axis in axes if axis.degree != 1 and axis.role != "pp")
    return Strategy(axes=kept, **flags)


def _parse_uniform(span: _Span) -> tuple[tuple[Axis, ...], dict[str, Any]]:
    """Parse one strategy: return its axes, including pp and degrees of 1, and the fields that its flags set."""
    if space := re.search(r"\s", span.word):
        raise StrategyError(f"whitespace {span.part(*space.span()).place}: remove it")
    axes_span, *flag_spans = span.split("+")
    return _parse_axes(axes_span), _parse_flags(flag_spans)


def _parse_axes(span: _Span) -> tuple[Axis, ...]:
    """Parse axes joined by `x`, as in `dp2xtp2`; at most one can have an open degree."""
    if not span.word:
        raise StrategyError(f"no axis before the '+' {span.place}: write one, as in dp1+ckpt")
    axes: dict[str, Axis] = {}
    open_span = None
    pieces = span.split("x")
    for index, piece in enumerate(pieces):
        if not piece.word:
            stray = piece.part(-1, 0) if index else piece
            raise StrategyError(f"stray 'x' {stray.place}: write one 'x' between two axes, as in dp2xtp2")
        axis = _parse_axis(piece)
        if axis.role in axes:
            degrees = (axes[axis.role].degree, axis.degree)
            fix = f", as in {axis.role}{degrees[0] * degrees[1]}" if degrees[0] and degrees[1] else ""
            raise StrategyError(f"role '{axis.role}' is repeated {piece.place}: give each role once{fix}")
        if axis.degree is None:
            if open_span:
                raise StrategyError(
                    f"both '{open_span.word}' and '{piece.word}' {piece.place} have no degree: "
                    f"only one axis can take the remaining ranks, give '{piece.word}' a degree"
                )
            open_span = piece
        axes[axis.role] = axis
    return tuple(axes.values())


def _parse_axis(span: _Span) -> Axis:
    """Parse one axis, as in `dp2`, or `dp` with an open degree."""
    word = span.word
    if word in FLAGS:
        raise StrategyError(f"'{word}' {span.place} is a flag, not an axis: write +{word} at the end")
    match = _AXIS.fullmatch(word)
    if not match:
        raise StrategyError(
            f"cannot read '{shown(word)}' {span.place}: an axis is a role and a degree, as in dp2, and axes are "
            "joined by 'x'"
        )
    role, degree = match.groups()
    if role not in _ROLE_NAMED:
        raise StrategyError(
            f"unknown role '{shown(role)}' {span.place}: roles are {', '.join(ROLES)}{nearest(role, ROLES)}"
        )
    if degree is not None and not 1 <= int(degree) <= MAX_RANKS:
        raise StrategyError(f"the degree of '{role}' {span.place} is {int(degree)}: use 1 to {MAX_RANKS:,}")
    return Axis(_ROLE_NAMED[role], None if degree is None else int(degree))


def _parse_flags(spans: list[_Span]) -> dict[str, Any]:
    """Return the fields of Strategy that the flags set."""
    flags: dict[str, Any] = {}
    seen: set[str] = set()
    for span in spans:
        if not span.word:
            raise StrategyError(
                f"empty flag {span.part(-1, 0).place}: write a flag after the '+', as in +ckpt, or drop it"
            )
        name, fields = _parse_flag(span)
        choice = _CHOICE.get(name, f"flag '{name}'")
        if choice in seen:
            choice = choice if choice.startswith("flag") else f"a {choice}"
            raise StrategyError(f"{choice} is repeated {span.place}: give each flag once")
        seen.add(choice)
        flags |= fields
    return flags


def _parse_flag(span: _Span) -> tuple[str, dict[str, Any]]:
    """Return a flag's name and the fields of Strategy that it sets."""
    if match := re.fullmatch(r"2\.5d@([0-9]{1,9})", span.word):
        return "2.5d", {"tensor_mode": "2.5d", "depth": int(match[1])}
    if span.word in TENSOR_MODES[1:]:
        return span.word, {"tensor_mode": span.word}
    name, dot, policy = span.word.partition(".")
    if name not in FLAGS or (dot and name != "ckpt"):
        raise StrategyError(f"unknown flag '{shown(span.word)}' {span.place}: {_about_flags(span.word)}")
    if dot and policy not in CHECKPOINT_POLICIES:
        raise StrategyError(
            f"unknown checkpoint policy '{shown(policy)}' {span.place}: policies are {', '.join(CHECKPOINT_POLICIES)}"
            f"{nearest(policy, CHECKPOINT_POLICIES)}"
        )
    match name:
        case "sp":
            return name, {"sequence_parallel": True}
        case "zero1" | "zero2":
            return name, {"zero": int(name[-1])}
        case "offload":
            return name, {"offload": True}
        case _:
            return name, {"checkpoint": policy or CHECKPOINT_POLICIES[0]}


def _about_flags(word: str) -> str:
    """Return the hint of a message about an unknown flag."""
    match = _AXIS.fullmatch(word)
    if match and match[1] in _ROLE_NAMED:
        return f"axes are joined by 'x' and come before the flags, as in dp2x{word}+ckpt"
    if word == "zero3":
        return "use the role fsdp instead of dp, which shards parameters as ZeRO-3 does"
    return f"flags are {', '.join(FLAGS)}{nearest(word, FLAGS)}"
