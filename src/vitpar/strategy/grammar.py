"""The strategy language: text to plan and back.

    uniform := axis { "x" axis } { "+" flag }      pp2xtp2xdp2    tp2xdp    dp2xfsdp4+ckpt
    axis    := role [ degree ]                     at most one axis leaves its degree open
    role    := pp | dp | fsdp | tp                 each at most once
    flag    := ckpt [ "." policy ]                 ckpt is ckpt.full

The leftmost axis is the outermost: its rank varies slowest, as in DeviceMesh. Upper case is read too. Words of the full
language that vitpar does not run yet are in `unbuilt.py` and refused by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from vitpar.errors import StrategyError, nearest
from vitpar.strategy.plan import CHECKPOINT_POLICIES, ROLES, Axis, Plan, Role, Strategy
from vitpar.strategy.unbuilt import UNBUILT, refuse_unbuilt

FLAGS = ("ckpt",)
_ROLE_NAMED: dict[str, Role] = {role: role for role in ROLES}
_AXIS = re.compile(r"([a-z]+)(-?[0-9]{1,9})?")
_LAYERED = re.compile(r"pp[0-9]*\s*:")


@dataclass(frozen=True)
class _Span:
    """A piece of the text as typed that knows where it stands, so that an error can point at it."""

    text: str
    start: int
    end: int

    @property
    def word(self) -> str:
        """The piece in lower case. Text outside ASCII stays: lowering could change its length, and nothing reads it."""
        piece = self.text[self.start : self.end]
        return piece.lower() if piece.isascii() else piece

    @property
    def place(self) -> str:
        return f"at position {self.start + 1} of '{self.text}'"

    def part(self, start: int, end: int) -> _Span:
        """The piece from `start` up to `end`, both counted from this one's start."""
        return _Span(self.text, self.start + start, self.start + end)

    def split(self, separator: str) -> list[_Span]:
        """The pieces between the separators, empty ones included."""
        pieces, start = [], 0
        for word in self.word.split(separator):
            pieces.append(self.part(start, start + len(word)))
            start += len(word) + len(separator)
        return pieces


def parse(text: str) -> Plan:
    """The plan that `text` says, its other fields at their defaults.

    Raises StrategyError with the position (from 1) of what is wrong and the way to mend it.
    """
    text = text.strip()
    whole = _Span(text, 0, len(text))
    if not text:
        raise StrategyError("the strategy is empty: write roles and degrees, as in dp2xtp2")
    if not text.isprintable():
        raise StrategyError(f"the strategy {text!r} is no line of text: write roles and degrees, as in dp2xtp2")
    if _LAYERED.match(whole.word):
        refuse_unbuilt("layerwise plans", f" {whole.place}")
    axes, checkpoint = _parse_uniform(whole)
    return Plan(layers=(("*", Strategy(checkpoint=checkpoint)),)).with_axes(axes)


def format_plan(plan: Plan) -> str:
    """The canonical string of a plan's axes and flags; one rank without axes is `dp1`."""
    return "x".join(map(str, plan.axes or (Axis("dp", 1),))) + _format_flags(plan.strategy)


def _parse_uniform(span: _Span) -> tuple[tuple[Axis, ...], str | None]:
    """Axes (degrees of 1 included) and checkpoint policy of one strategy."""
    if space := re.search(r"\s", span.word):
        raise StrategyError(f"white space {span.part(*space.span()).place}: write the strategy without it")
    axes_span, *flag_spans = span.split("+")
    return _parse_axes(axes_span), _parse_flags(flag_spans)


def _parse_axes(span: _Span) -> tuple[Axis, ...]:
    if not span.word:
        raise StrategyError(f"no axis stands before the '+' {span.place}: write one, as in dp1+ckpt")
    axes: dict[str, Axis] = {}
    open_span = None
    pieces = span.split("x")
    for index, piece in enumerate(pieces):
        if not piece.word:
            stray = piece.part(-1, 0) if index else piece
            raise StrategyError(f"stray 'x' {stray.place}: one 'x' stands between two axes, as in dp2xtp2")
        axis = _parse_axis(piece)
        if axis.role in axes:
            degrees = (axes[axis.role].degree, axis.degree)
            fix = f", as in {axis.role}{degrees[0] * degrees[1]}" if degrees[0] and degrees[1] else ""
            raise StrategyError(f"role '{axis.role}' stands again {piece.place}: give each role once{fix}")
        if axis.degree is None:
            if open_span:
                raise StrategyError(
                    f"both '{open_span.word}' and '{piece.word}' {piece.place} have no degree: "
                    f"only one axis can take what is left of the ranks, give '{piece.word}' a degree"
                )
            open_span = piece
        axes[axis.role] = axis
    return tuple(axes.values())


def _parse_axis(span: _Span) -> Axis:
    word = span.word
    if word in FLAGS or f"+{word}" in UNBUILT:
        raise StrategyError(f"'{word}' {span.place} is a flag, not an axis: write +{word} at the end")
    match = _AXIS.fullmatch(word)
    if not match:
        raise StrategyError(
            f"cannot read '{word}' {span.place}: an axis is a role and a degree, as in dp2, and axes are joined by 'x'"
        )
    role, degree = match.groups()
    if role not in _ROLE_NAMED:
        raise StrategyError(f"unknown role '{role}' {span.place}: roles are {', '.join(ROLES)}{nearest(role, ROLES)}")
    if degree is not None and int(degree) < 1:
        raise StrategyError(f"the degree of '{role}' {span.place} is {int(degree)}: use 1 or more")
    return Axis(_ROLE_NAMED[role], None if degree is None else int(degree))


def _parse_flags(spans: list[_Span]) -> str | None:
    """The checkpoint policy the flags ask for, None for none."""
    checkpoint = None
    for span in spans:
        if not span.word:
            raise StrategyError(
                f"empty flag {span.part(-1, 0).place}: write a flag after the '+', as in +ckpt, or drop it"
            )
        refuse_unbuilt("+" + re.sub(r"@[0-9]+$", "", span.word), f" {span.place}")
        name, dot, policy = span.word.partition(".")
        if name not in FLAGS:
            raise StrategyError(f"unknown flag '{span.word}' {span.place}: {_about_flags(span.word)}")
        if dot and policy not in CHECKPOINT_POLICIES:
            raise StrategyError(
                f"unknown checkpoint policy '{policy}' {span.place}: policies are {', '.join(CHECKPOINT_POLICIES)}"
                f"{nearest(policy, CHECKPOINT_POLICIES)}"
            )
        if checkpoint:
            raise StrategyError(f"flag 'ckpt' stands again {span.place}: give each flag once")
        checkpoint = policy or CHECKPOINT_POLICIES[0]
    return checkpoint


def _about_flags(word: str) -> str:
    match = _AXIS.fullmatch(word)
    if match and match[1] in _ROLE_NAMED:
        return f"axes are joined by 'x' and stand before the flags, as in dp2x{word}+ckpt"
    return f"flags are {', '.join(FLAGS)}{nearest(word, FLAGS)}"


def _format_flags(strategy: Strategy) -> str:
    if strategy.checkpoint is None:
        return ""
    return "+ckpt" if strategy.checkpoint == CHECKPOINT_POLICIES[0] else f"+ckpt.{strategy.checkpoint}"
