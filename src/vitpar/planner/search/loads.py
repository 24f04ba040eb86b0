"""Least costs of layers, from the terms that `vitpar.planner.cost.stage` and `memory` replay, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.records import PipelinePosition

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

_WORK = (
    "forward",
    "backward",
    "weight_grad_time",
    "forward_sent",
    "backward_sent",
    "beside",
    "across",
    "saved",
    "workspace",
)
_WEIGHTS = (
    "trained_elements",
    "local_bytes",
    "gradient_bytes",
    "gathered",
    "unreduced_grad_bytes",
    "offloaded",
    "gather",
    "reduce",
    "summed",
    "shard_across",
    "copies_across",
    "message",
)
_EXECUTION = ("wrapped", "gathers_every_forward", "gathers_in_backward", "reshard_after_forward")
_work, _weights, _execution = attrgetter(*_WORK), attrgetter(*_WEIGHTS), attrgetter(*_EXECUTION)
_REDUCED = ("every micro-batch", "last micro-batch", "end of step")
_PARAMETERS = (*_WEIGHTS, "j", "k", *_EXECUTION, *_REDUCED)
_WAYS = {"offloaded", "shard_across", "copies_across", *_EXECUTION, *_REDUCED}


@dataclass(frozen=True, eq=False)
class Loads:
    """Lower bounds of each layer's time and memory, arrays [kinds, strategies].

    All but `working`, `fresh` and `working_once` add up over layers.
    """

    forward: Array
    """Seconds of computing per micro-batch in forward."""
    computes: Array
    """Seconds of computing per micro-batch in forward and backward."""
    late: Array
    """Seconds per micro-batch of gradients of weights, which a zero-bubble schedule may run later."""
    waits: Array
    """Seconds of blocking communication per micro-batch."""
    waits_across: Array
    """Seconds of `waits` across nodes, where background communication within nodes progresses."""
    once: Array
    """Seconds of the optimizer per step."""
    waits_once: Array
    """Seconds of blocking communication once per step."""
    edge: Array
    """Seconds once per step of embed's communication that nothing overlaps: the first gather and the last reduction.
    """
    sent_each: Array
    """Seconds of background communication per micro-batch."""
    sent_once: Array
    """Seconds of background communication once per step."""
    sent_early: Array
    """Seconds of `sent_once` that the first forward waits for."""
    sent_late: Array
    """Seconds of `sent_once` that begin in the last micro-batch's backward."""
    sent_each_across: Array
    """Seconds of `sent_each` across nodes."""
    sent_once_across: Array
    """Seconds of `sent_once` across nodes."""
    sent_late_across: Array
    """Seconds of `sent_late` across nodes."""
    kept: Array
    """Bytes of parameters and optimizer state, kept for the complete run."""
    reduced: Array
    """Bytes of gradients when the optimizer steps."""
    gathered: Array
    """Bytes of parameter copies kept during a complete step."""
    gradients: Array
    """Bytes of gradients kept between the step's backwards."""
    saved: Array
    """Bytes per micro-batch kept between forward and backward."""
    working: Array
    """Transient bytes at the peak of the layer's backward or reduction, in a step of several backwards."""
    fresh: Array
    """Transient bytes of new gradients in the step's first backward, if the later ones have none; else in `working`."""
    working_once: Array
    """Transient bytes at the peak of the layer's backward or reduction, in a step with a single backward."""
    copied: Array
    """Transient bytes of a reduction at the end of the step."""

    @cached_property
    def work(self) -> Array:
        """Seconds of computing and of blocking communication per micro-batch."""
        return self.computes + self.waits

    @cached_property
    def settled(self) -> Array:
        """Bytes after the layer's last backward: its gradients may be reduced then."""
        return self.kept + self.gathered + np.minimum(self.reduced, self.gradients)

    def at(self, rows: Indices | Array, columns: Indices) -> Loads:
        """Return the loads at these indices of every array."""
        return Loads(*(getattr(self, field.name)[rows, columns] for field in fields(self)))


class Layers:
    """Costs of the parameters of each kind of layer under several strategies, from which `loads` follow.

    positions: strategies with their process groups
    fits: whether each strategy can split each kind of layer, an array [kinds, strategies]
    """

    def __init__(self, costs: LayerCosts, positions: Sequence[PipelinePosition], fits: NDArray[np.bool_]) -> None:
        self._costs, self.positions, self.fits = costs, positions, fits
        kinds = tuple(costs.config.kinds)
        none = (0.0,) * len(_PARAMETERS)
        rows = [
            [
                self._parameters(kind, position) if fit else none
                for position, fit in zip(positions, fits[row].tolist(), strict=True)
            ]
            for row, kind in enumerate(kinds)
        ]
        table = np.array(rows, dtype=float).reshape(len(kinds), len(positions), len(none))
        self.parameters: Array = np.moveaxis(table, 2, 0)
        """Costs of parameters and how a step spends them, [costs, kinds, strategies]."""

    def lightest(self, alike: Indices) -> Indices:
        """Return the numbers of the strategies whose parameters cost less than those of any other one, in some way.

        alike: number of each strategy; only those with equal numbers are compared
        """
        costs = self.parameters.reshape(-1, len(self.positions))
        # Ways to spend these costs cannot be compared.
        ways = np.repeat([name in _WAYS for name in _PARAMETERS], len(self.fits))
        _, groups = np.unique(np.vstack([alike, costs[ways]]), axis=1, return_inverse=True)
        return undominated(costs[~ways], groups.ravel())

    def _parameters(self, kind: str, position: PipelinePosition) -> tuple[float, ...]:
        weights, execution = self._costs.weights(kind, position), position.executions[kind]
        sums = (weights.sums.get(axis, 0) for axis in ("j", "k"))
        reduced = (execution.reduced == when for when in _REDUCED)
        return *_weights(weights), *sums, *_execution(execution), *reduced

    def least_loads(self, columns: Indices, rows: int, moments: float, pipelined: bool) -> Loads:
        """Return lower bounds of the costs of layers in any plan.

        columns: numbers of the strategies
        rows: images of a micro-batch over all ranks of the stage
        moments: bytes of optimizer state per byte of parameters
        pipelined: whether the plan has several stages
        """
        costs, in_order = self._costs, self._costs.hardware.device == "cpu"
        fits, given = self.fits[:, columns], self.parameters[:, :, columns]
        w = dict(zip(_WORK, self._work(columns, rows), strict=True))
        p = dict(zip(_PARAMETERS, given, strict=True))
        wrapped, every, last = p["wrapped"], p["every micro-batch"], p["last micro-batch"]
        blocked, overlapped = wrapped * in_order, wrapped * (not in_order)
        gathers = p["gather"] * (p["gathers_every_forward"] + p["gathers_in_backward"])
        gathers_once = p["gather"] * wrapped * (1 - p["gathers_every_forward"])
        reduce, shard_across = p["reduce"], p["shard_across"]
        reduce_across = (reduce - p["summed"]) * shard_across + p["summed"] * p["copies_across"]
        update = costs.model.optimizer.least  # seconds per element on the device
        sent = w["forward_sent"] + w["backward_sent"] + w["beside"]
        waits_once = blocked * (gathers_once + reduce * (1 - every)) + overlapped * reduce * p["end of step"]
        # Layers without `fully_shard` overlap their reduction on a CPU, too.
        sent_late = reduce * (1 - wrapped + overlapped * last)
        late_across = reduce_across * ((1 - wrapped) * (not in_order) + overlapped * last)
        # The step's first gather and last reduction are embed's: no layer computes before the one or after the other.
        # On a CPU, wrapped layers block anyway and are counted in waits and waits_once.
        edge = np.zeros_like(reduce)
        if not pipelined:
            edge[0] = (reduce * (1 - blocked) + p["gather"] * (not in_order))[0]
        # The terms below are those of `memory._Walk`: two gathered copies while one layer computes and the next is
        # fetched, and gradients twice during a reduction, as they are and as the collective's buffer. By then the
        # layer's saved activations are freed, hence their subtraction.
        trained = p["gradient_bytes"] * (1 - p["offloaded"])
        workspace = w["workspace"] + p["gathered"] * 2 * p["reshard_after_forward"]
        fresh = np.where(wrapped > 0, p["unreduced_grad_bytes"], p["gradient_bytes"])
        summing = (fresh + p["message"]) * (p["message"] > 0)
        scattering = 2 * fresh * (1 - p["end of step"])
        reducing = np.where(wrapped > 0, scattering, summing)
        working_once = np.maximum(workspace + fresh, reducing - w["saved"])
        again = wrapped * every > 0
        return Loads(
            forward=w["forward"],
            computes=w["forward"] + w["backward"] - w["beside"],
            late=w["weight_grad_time"],
            # A strategy that cannot split a layer has costs above every limit, but finite: weights of 0 multiply them.
            waits=np.where(fits, sent + blocked * (gathers + reduce * every), 1e15),
            # On a CPU, nothing else is sent while a rank waits: all counts as one wire.
            waits_across=sent * w["across"] * (not in_order),
            once=p["trained_elements"] * np.where(p["offloaded"] > 0, costs.update(1, True), update),
            waits_once=waits_once,
            edge=edge,
            sent_each=np.where(fits, overlapped * (gathers + reduce * every), 1e15),
            sent_once=sent_late + overlapped * gathers_once,
            sent_early=overlapped * gathers_once,
            sent_late=sent_late,
            sent_each_across=overlapped * (gathers * shard_across + reduce_across * every),
            sent_once_across=late_across + overlapped * gathers_once * shard_across,
            sent_late_across=late_across,
            kept=np.where(fits, p["local_bytes"] * (1 - p["offloaded"]) + trained * moments, 1e30),
            reduced=trained,
            gathered=p["gathered"] * (1 - p["reshard_after_forward"]),
            gradients=np.where((wrapped > 0) & ~again, p["unreduced_grad_bytes"], trained),
            saved=w["saved"],
            working=np.where(again, working_once, workspace),
            fresh=fresh * ~again,
            working_once=working_once,
            copied=wrapped * p["end of step"] * fresh,
        )

    def _work(self, columns: Indices, rows: int) -> Array:
        """Return the costs of computing a micro-batch, [costs, kinds, strategies]."""
        positions = [self.positions[column] for column in columns.tolist()]
        alike = {(position.computes, position.data): number for number, position in enumerate(positions)}
        places = {key: place for place, key in enumerate(alike)}
        none, found = (0.0,) * len(_WORK), []
        for row, kind in enumerate(self._costs.config.kinds):
            fits = self.fits[row, columns]
            works = [self._costs.work(kind, positions[n], rows) if fits[n] else None for n in alike.values()]
            found.append([_work(work) if work else none for work in works])
        of = np.array([places[position.computes, position.data] for position in positions], dtype=np.int64)
        table = np.array(found, dtype=float).reshape(len(self.fits), len(alike), len(none))
        return np.moveaxis(table, 2, 0)[:, :, of]


def undominated(costs: Array, alike: Indices) -> Indices:
    """Return the columns of `costs` that no other is below in all rows, of the equal ones one, in order.

    alike: number of each column; only columns with equal numbers are compared
    """
    left, kept = costs.sum(0).argsort(kind="stable"), list[int]()
    while len(left):
        # A column that is below another one has no larger sum.
        first, left = int(left[0]), left[1:]
        kept.append(first)
        below = (costs[:, left] >= costs[:, [first]]).all(0) & (alike[left] == alike[first])
        left = left[~below]
    return np.array(sorted(kept), dtype=np.int64)
