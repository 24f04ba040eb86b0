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
from typing import Any, cast

from vitpar.errors import StrategyError
from vitpar.strategy.layer import ROLES, Axis, Role, Strategy
from vitpar.strategy.plan import Plan, without_pp
from vitpar.strategy.selectors import blocks_of
from vitpar.text import literal, nearest, shown

_FIELDS: dict[str, dict[str, Any]] = {
    "sp": {"sequence_parallel": True},
    **{mode: {"tensor_mode": mode} for mode in ("2d", "2.5d", "3d")},
    **{f"zero{stage}": {"zero": stage} for stage in (1, 2)},
    **{"ckpt": {"checkpoint": "full"}, "ckpt.full": {"checkpoint": "full"}},
    **{"ckpt.selective": {"checkpoint": "selective"}, "offload": {"offload": True}},
}
"""Fields of Strategy that each flag sets."""
_AXIS = re.compile(r"([a-z]+)(-?[0-9]{1,9})?")
_LAYERED = re.compile(r"(pp(?:[0-9]{1,9})?)\s*:")
_DEPTH = re.compile(r"2\.5d@([0-9]{1,9})")


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

    def error(self, message: object) -> StrategyError:
        """Return the error `what is wrong: what to do` with the position of the piece, counted from 1."""
        what, _, fix = str(message).rpartition(": ")
        return StrategyError(f"{what} at position {self.start + 1} of '{shown(self.text, self.start)}': {fix}")


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
        groups = [_parse_group(piece.stripped) for piece in whole.part(match.end(), len(text)).split(",")]
        return Plan(layers=tuple(groups), pp=pipeline.degree)
    axes, flags = _parse_uniform(whole)
    inside, pp, pp_index = without_pp(axes)
    return Plan((("*", Strategy(inside, **flags)),), pp, pp_index)


def _parse_group(span: _Span) -> tuple[str, Strategy]:
    """Parse a group such as `0-11=tp2xfsdp2`, with optional white space around the sign."""
    selector, *rest = (piece.stripped for piece in span.split("="))
    if len(rest) != 1:
        what = f"cannot read '{shown(span.word)}'" if span.word else "empty group"
        raise span.error(f"{what}: a group is layers=strategy, as in 0-11=dp2")
    try:
        blocks_of(selector.word)
    except StrategyError as error:
        raise selector.error(error) from None
    axes, flags = _parse_uniform(rest[0])
    if any(axis.role == "pp" for axis in axes):
        raise span.error("pp is inside a group: write pp once for all layers, before the ':'")
    return selector.word, Strategy(axes, **flags)


def _parse_uniform(span: _Span) -> tuple[tuple[Axis, ...], dict[str, Any]]:
    """Parse one strategy: return its axes, including pp but no degrees of 1, and the fields that its flags set."""
    if space := re.search(r"\s", span.word):
        raise span.part(*space.span()).error("whitespace: remove it")
    axes, *flags = span.split("+")
    return _parse_axes(axes), _parse_flags(flags)


def _parse_axes(span: _Span) -> tuple[Axis, ...]:
    """Parse axes joined by `x`, as in `dp2xtp2`; at most one can have an open degree."""
    if not span.word:
        raise span.error("no axis before the '+': write one, as in dp1+ckpt")
    axes: dict[str, Axis] = {}
    pieces = span.split("x")
    for index, piece in enumerate(pieces):
        if not piece.word:
            stray = piece.part(-1, 0) if index else piece
            raise stray.error("stray 'x': write one 'x' between two axes, as in dp2xtp2")
        axis = _parse_axis(piece)
        if axis.role in axes:
            raise piece.error(f"role '{axis.role}' is repeated: give each role once")
        if axis.degree is None and any(other.degree is None for other in axes.values()):
            raise piece.error(f"'{axis}' is the second axis without a degree: give one of them a number")
        axes[axis.role] = axis
    return tuple(axis for axis in axes.values() if axis.degree != 1)


def _parse_axis(span: _Span) -> Axis:
    """Parse one axis, as in `dp2`, or `dp` with an open degree."""
    if span.word in _FIELDS:
        raise span.error(f"'{span.word}' is a flag, not an axis: write +{span.word} at the end")
    match = _AXIS.fullmatch(span.word)
    if not match:
        raise span.error(
            f"cannot read '{shown(span.word)}': an axis is a role and a degree, as in dp2, and axes are joined by 'x'"
        )
    try:
        return Axis(cast(Role, match[1]), None if match[2] is None else int(match[2]))
    except StrategyError as error:
        raise span.error(error) from None


def _parse_flags(spans: list[_Span]) -> dict[str, Any]:
    """Return the fields of Strategy that the flags set."""
    flags: dict[str, Any] = {}
    for span in spans:
        if depth := _DEPTH.fullmatch(span.word):
            fields: dict[str, Any] = {"tensor_mode": "2.5d", "depth": int(depth[1])}
        elif span.word in _FIELDS:
            fields = _FIELDS[span.word]
        elif not span.word:
            raise span.part(-1, 0).error("empty flag: write a flag after the '+', as in +ckpt, or drop it")
        else:
            raise span.error(f"unknown flag '{shown(span.word)}': {_about_flags(span.word)}")
        if flags.keys() & fields.keys():
            raise span.error(f"+{span.word} repeats a flag, or contradicts one: give one of them")
        flags |= fields
    return flags


def _about_flags(word: str) -> str:
    """Return the hint of a message about an unknown flag."""
    match = _AXIS.fullmatch(word)
    if match and match[1] in ROLES:
        return f"axes are joined by 'x' and come before the flags, as in dp2x{word}+ckpt"
    if word == "zero3":
        return "use the role fsdp instead of dp, which shards parameters as ZeRO-3 does"
    return f"flags are {', '.join(_FIELDS)}{nearest(word, _FIELDS)}"
