"""Timeline of a step: actions of each place of the pp axis, or computing and communication without a pipeline."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.links import placed
from vitpar.planner.cost.pipeline import Event
from vitpar.planner.cost.price import Price
from vitpar.planner.cost.records import PlacedStrategy
from vitpar.planner.cost.stage import Streams, Transfer, build_stage
from vitpar.planner.profile.profiles import Overlap
from vitpar.runs.pages.figures import ACTIONS, SentMessage, Span
from vitpar.strategy import batch_arithmetic

COMPUTES, SENDS = "computes", "sends"
"""Rows of a timeline without a pipeline; with one, rows are places of the pp axis."""
LOCAL = ("other", "optimizer", "teacher")
"""Parts of a step's time that are neither layers nor communication."""


def timeline(price: Price, costs: LayerCosts) -> tuple[Span, ...]:
    """Return the spans of one step, in the order of their starts."""
    before = price.time.get("teacher", 0.0)
    if price.plan.pipeline_degree > 1:
        rows = range(price.plan.pipeline_degree) if before else ()
        spans = [Span(f"pp {row}", "teacher", 0.0, before) for row in rows]
        return (*spans, *spans_of(price.events))
    plan = price.plan
    batch, strategies = batch_arithmetic(plan, price.batch_size), plan.strategies(costs.config.layer_names)
    layers = [(layer.kind, strategies[name]) for name, layer in costs.config.layers.items()]
    stage = build_stage(costs, layers, batch.microbatch_rows, PlacedStrategy(*placed(plan), plan.splits_backward))
    streams = _Recorder(costs.hardware.overlap)
    for number in range(batch.microbatches):
        streams.microbatch = number
        stage.forward(streams, number == 0)
        stage.backward(streams, number == batch.microbatches - 1)
        streams.block(costs.model.microbatch, "other")
    streams.microbatch = None
    streams.wait(None, "gradients")
    optimizer = price.seconds - price.time.get("optimizer", 0.0)
    spans = [replace(span, start=span.start + before, end=span.end + before) for span in streams.spans()]
    ends = [
        Span(COMPUTES, "teacher", 0.0, before),
        Span(SENDS, "gradients", streams.at + before, optimizer),  # sums over tensor axes
        Span(COMPUTES, "optimizer", optimizer, price.seconds),
    ]
    return _joined([*spans, *(span for span in ends if span.end - span.start > 1e-9 * price.seconds)])


def spans_of(events: Iterable[Event]) -> list[Span]:
    """Return the spans of a pipeline's actions, in the order of their starts."""
    spans = (Span(f"pp {e.pp}", ACTIONS[e.computation], e.start, e.end, e.microbatch, e.stage) for e in events)
    return sorted(spans, key=lambda span: (span.start, span.row))


def messages(price: Price) -> tuple[SentMessage, ...]:
    """Return the messages between the ranks of a pipeline, in the order of their arrivals."""
    ends = {(e.computation, e.stage, e.microbatch): e for e in price.events}
    found = []
    for event in price.events:
        if event.arrived is None:
            continue
        forward = event.computation == "F"
        stage = event.stage + (-1 if forward else 1)
        kinds = "F" if forward else "BI"
        source = next(ends[kind, stage, event.microbatch] for kind in kinds if (kind, stage, event.microbatch) in ends)
        if source.pp != event.pp:
            words = f"{'output' if forward else 'gradient'} of stage {stage} for micro-batch {event.microbatch}"
            found.append(SentMessage(f"pp {source.pp}", f"pp {event.pp}", source.end, event.arrived, words))
    return tuple(sorted(found, key=lambda message: message.arrived))


def _joined(spans: list[Span]) -> tuple[Span, ...]:
    """Merge neighbouring spans of the same action."""
    joined: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.row, span.start)):
        last = joined[-1] if joined else None
        alike = last and (last.row, last.what, last.microbatch) == (span.row, span.what, span.microbatch)
        if last and alike and span.start - last.end <= 1e-9:
            joined[-1] = replace(last, end=span.end)
        else:
            joined.append(span)
    return tuple(sorted(joined, key=lambda span: (span.start, span.row)))


class _Recorder(Streams):
    """Streams that record spans.

    microbatch: index that new spans get; None for what belongs to no micro-batch
    """

    def __init__(self, overlap: Overlap | None) -> None:
        super().__init__(overlap)
        self.microbatch: int | None = None
        self._spans: list[Span] = []
        self._jobs: list[tuple[Transfer, float, float, int | None]] = []
        self._awaited: dict[Transfer, str] = {}

    def spans(self) -> list[Span]:
        """Return all spans. Background transfers that nothing waited for are gradients."""
        sent = [Span(SENDS, self._awaited.get(job, "gradients"), a, b, number) for job, a, b, number in self._jobs]
        return [*self._spans, *sent]

    def wait(self, job: Transfer | None, what: str) -> None:
        """Record what the rank waits for; all transfers that nothing waited for are gradients."""
        if job is not None:
            self._awaited[job] = what
        super().wait(job, what)

    def _book(self, what: str, begun: float) -> None:
        super()._book(what, begun)
        self._note(what, begun)

    def _advance(self, seconds: float, heads: list[Transfer], rates: list[float], across: bool = False) -> None:
        """Record the background transfers that progress."""
        self._jobs += [(head, self.at, self.at + seconds, self.microbatch) for head in heads]
        super()._advance(seconds, heads, rates, across)

    def _note(self, what: str, begun: float) -> None:
        """Record a span from `begun` until now, unless it is empty."""
        if self.at > begun:
            row = COMPUTES if what in (*LOCAL, "forward", "backward") else SENDS
            self._spans.append(Span(row, what, begun, self.at, self.microbatch))
