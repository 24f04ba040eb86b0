"""What a strategy costs each kind of layer, and which strategies another one makes needless."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from vitpar.planner.cost.layer import LayerCosts, Placement, Weights, gathers_always
from vitpar.planner.cost.stage import StageLayer
from vitpar.planner.profile.model import LayerKind
from vitpar.planner.search.space import Space
from vitpar.strategy import Plan, Strategy
from vitpar.strategy.layout import row_unit, token_layout_key

T = TypeVar("T")
KINDS: tuple[LayerKind, ...] = ("stem", "block", "head")


@dataclass(frozen=True)
class Load:
    """What a layer takes at least, so that layers add up.

    forward: seconds of computing forward. computes: backward too. late: of backward, what may come later. waits:
    seconds of a rank for every micro-batch. once: seconds once a step, the optimizer's among them. edge: seconds that
    nothing goes on beside: gathering the first layer, reducing its gradients. sent_each, sent_once: seconds on the way
    in the background for every micro-batch, and once a step. kept: bytes all the time. reduced: bytes of gradients when
    the optimizer steps. gathered: bytes during a step. gradients: bytes after the first backward. saved: bytes for
    every micro-batch between forward and backward.
    """

    forward: float
    computes: float
    late: float
    waits: float
    once: float
    edge: float
    sent_each: float
    sent_once: float
    kept: float
    reduced: float
    gathered: float
    gradients: float
    saved: float


@dataclass(frozen=True)
class Option:
    """A strategy for layers of every kind, for one number of rows. layers: by kind. loads: by kind."""

    strategy: Strategy
    layers: dict[LayerKind, StageLayer]
    loads: dict[LayerKind, Load]


class Options:
    """The strategies worth looking at, by pipeline and rows of a micro-batch.

    A strategy is left out where another one with the same layouts is no worse in anything that a price depends on.
    moments: bytes that the optimizer keeps for every byte of parameters.
    """

    def __init__(self, space: Space, costs: LayerCosts, moments: float) -> None:
        self._space, self._costs, self._moments = space, costs, moments
        self._update = costs.model.optimizer.least * costs.crowd(space.ranks)  # seconds for an element
        self._light: dict[tuple[int, bool], list[Strategy]] = {}
        self._found: dict[tuple[int, bool, int], list[Option]] = {}
        self.strategies = 0

    def of(self, pipeline: Plan, rows: int) -> list[Option]:
        """Those for a stage of `pipeline` and micro-batches of `rows` images."""
        pp = pipeline.pipeline_degree
        size = self._space.ranks // pp
        plain = self._space.allows(pipeline, Strategy(checkpoint="full"))  # schedules clash with checkpoints or not
        key = pp, plain, rows
        if key not in self._found:
            where = Placement(pp=pp)
            light = self._lightest(pipeline, size, plain, where)
            options = [self._option(s, rows, where) for s in light if rows % row_unit(s) == 0]
            self._found[key] = list(_undominated(options))
        return self._found[key]

    def _lightest(self, pipeline: Plan, size: int, plain: bool, where: Placement) -> list[Strategy]:
        """Of strategies that compute alike, those whose parameters are not worse in everything."""
        key = where.pp, plain
        if key in self._light:
            return self._light[key]
        alike: dict[tuple, list[tuple[Strategy, tuple[float, ...]]]] = defaultdict(list)
        for strategy in self._space.strategies(size):
            if not self._space.allows(pipeline, strategy):
                continue
            self.strategies += 1
            groups = self._costs.groups(strategy, where)
            arithmetic = (
                token_layout_key(strategy),
                strategy.tensor_mode,
                strategy.sequence_parallel,
                strategy.degree("tp"),
                strategy.checkpoint,
                self._costs.wrapped(strategy),
                (groups.j, groups.k),
            )
            parts = tuple(
                part
                for kind in KINDS
                for part in _of_weights(
                    self._costs.weights(kind, strategy, where), strategy, gathers_always(strategy, where.pp > 1, kind)
                )
            )
            alike[arithmetic].append((strategy, parts))
        self._light[key] = [strategy for same in alike.values() for strategy in _front(same)]
        return self._light[key]

    def _option(self, strategy: Strategy, rows: int, where: Placement) -> Option:
        layers: dict[LayerKind, StageLayer] = {}
        for kind in KINDS:
            work = self._costs.work(kind, strategy, rows, where)
            weights = self._costs.weights(kind, strategy, where)
            layers[kind] = StageLayer(kind, strategy, work, weights, gathers_always(strategy, where.pp > 1, kind))
        in_order = self._costs.hardware.device == "cpu"
        loads = {kind: self._load(layer, in_order, where.pp > 1) for kind, layer in layers.items()}
        return Option(strategy, layers, loads)

    def _load(self, layer: StageLayer, in_order: bool, pipelined: bool) -> Load:
        work, weights, twice = layer.work, layer.weights, layer.strategy.zero == 2
        waits = work.forward_sent + work.backward_sent
        once = edge = sent_each = sent_once = 0.0
        if layer.kind == "stem" and not pipelined:
            edge = weights.reduce * (not in_order or not weights.wrapped) + weights.gather * (not in_order)
        if not weights.wrapped:
            sent_once = weights.reduce
        elif in_order:
            waits += 2 * weights.gather * layer.always + weights.reduce * twice
            once = weights.gather * (not layer.always) + weights.reduce * (not twice)
        else:
            sent_each = 2 * weights.gather * layer.always + weights.reduce * twice
            sent_once = weights.gather * (not layer.always) + weights.reduce * (not twice and not pipelined)
            once = weights.reduce * (pipelined and not twice)
        if pipelined:  # the ranks meet after every action, where layers' skews add up as random numbers do
            waits += sum(work.skew) / (self._space.config.depth + 2) ** 0.5
        shard = 0.0 if layer.strategy.offload else weights.held
        return Load(
            forward=work.forward,
            computes=work.forward + work.backward,
            late=work.late,
            waits=waits,
            once=once + weights.elements * self._update,
            edge=edge,
            sent_each=sent_each,
            sent_once=sent_once,
            kept=shard * (1 + self._moments),
            reduced=shard,
            gathered=0.0 if layer.always else weights.gathered,
            gradients=weights.waiting if weights.wrapped and not twice else shard,
            saved=work.saved,
        )


def _of_weights(weights: Weights, strategy: Strategy, always: bool) -> tuple[float, ...]:
    """What a price depends on; more of any is never better."""
    twice = strategy.zero == 2
    wrapped = weights.wrapped
    return (
        float(weights.elements),
        weights.gather * (wrapped and not always),
        weights.gather * (wrapped and always),
        weights.gathered * (not always),
        weights.gathered * always,
        weights.reduce * (wrapped and not twice),
        weights.reduce * (wrapped and twice),
        weights.reduce * (not wrapped),
        weights.waiting * (wrapped and not twice),
        weights.waiting * (wrapped and twice),
        weights.held,
        *(float(weights.sums.get(axis, 0)) for axis in ("j", "k")),
    )


def _of_layer(layer: StageLayer) -> tuple[float, ...]:
    work = layer.work
    return (
        work.forward,
        work.backward,
        work.late,
        *work.skew,
        work.forward_sent,
        work.backward_sent,
        work.saved,
        work.workspace,
        *_of_weights(layer.weights, layer.strategy, layer.always),
    )


def _undominated(options: Iterable[Option]) -> Iterable[Option]:
    by_layout: dict[tuple, list[tuple[Option, tuple[float, ...]]]] = defaultdict(list)
    for option in options:
        parts = tuple(part for kind in KINDS for part in _of_layer(option.layers[kind]))
        by_layout[token_layout_key(option.strategy)].append((option, parts))
    for same in by_layout.values():
        yield from _front(same)


def _front(pairs: list[tuple[T, tuple[float, ...]]]) -> list[T]:
    """Those that no other is as good as in everything; the first of equals."""
    kept: list[tuple[T, tuple[float, ...]]] = []
    for item, parts in sorted(pairs, key=lambda pair: sum(pair[1])):
        if not any(all(a <= b for a, b in zip(other, parts, strict=True)) for _, other in kept):
            kept.append((item, parts))
    return [item for item, _ in kept]
