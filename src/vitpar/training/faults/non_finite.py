"""Steps whose loss or gradients are not finite: what becomes of them, and where the first such number was.

Without a scaled loss and without `faults.non_finite = "skip"` nothing is read from the device until the log interval
ends. What tells where it was, the norms of each gradient, is there anyway, and is kept until then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from vitpar.launch.world_group import all_gather_json, all_reduce_
from vitpar.parallel import ParallelModel
from vitpar.sharded import local
from vitpar.text import count, ranks
from vitpar.training.optim.loss_scale import LossScaler
from vitpar.training.optim.norms import ShardNorms
from vitpar.training.recipe import Recipe


class _Found(NamedTuple):
    """Numbers that were not finite: the losses of which ranks, and the first tensor (in the model's order) of which
    ranks."""

    losses: list[int]
    tensor: str | None
    ranks: list[int]


class NonFinite:
    """Looks at every step of a run. All ranks have one, are told the same and answer the same.

    scaler: of a scaled loss. What it skips is its affair; the run only stops where the scale cannot fall.
    """

    def __init__(self, recipe: Recipe, model: ParallelModel, scaler: LossScaler | None) -> None:
        self._recipe, self._model, self._scaler = recipe, model, scaler
        self.waits = scaler is not None or recipe.faults.non_finite == "skip"
        """Whether a step is known to be finite before its update, for which the host waits for the device."""
        self._seen: dict[int, tuple[Tensor, Sequence[ShardNorms]]] = {}
        self._in_a_row = 0
        self._last = ""

    def look(self, step: int, loss: Tensor, parts: Sequence[ShardNorms], norm: Tensor) -> dict[str, Any]:
        """Take in a step's loss (this rank's part) and gradients, by the norms of their parts and of all. Returns what
        its row of metrics says of it: `skipped`, where steps may be. Collective at a step that is skipped."""
        if not self.waits:
            self._seen[step] = loss, parts
            return {}
        skipped = not math.isfinite(norm.item())  # waits for the device
        if self._scaler:
            scale = self._scaler.scale
            self._scaler.update(skipped)
            return {"loss_scale": scale, "skipped": skipped}
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if not skipped:
            return {"skipped": False}
        found = self._found(loss, parts)
        self._last = _words(found)
        return {"skipped": True, "bad_loss_ranks": found.losses, "bad_gradient": found.tensor, "bad_ranks": found.ranks}

    def stuck(self, step: int) -> str | None:
        """The sentence to stop with after `step`, where skipping further ones has no use."""
        if self._scaler:
            overflows = (
                f"float16 overflows still at step {step} under {self._scaler.floor}, so the loss scale cannot fall: "
                f"lower that or optimizer.lr ({self._recipe.optimizer.lr}), or set train.precision to bf16"
            )
            return overflows if self._scaler.exhausted else None
        if self._in_a_row < self._recipe.faults.max_skipped:
            return None
        return (
            f"{count(self._in_a_row, 'step')} in a row had to be skipped, the last of them step {step} (not finite: "
            f"{self._last}): lower optimizer.lr ({self._recipe.optimizer.lr}), or raise faults.max_skipped"
        )

    def until_diverged(self, rows: Sequence[dict[str, Any]]) -> tuple[Sequence[dict[str, Any]], str | None]:
        """The newest `rows` before the first that is not finite and was not skipped, and the sentence to stop with for
        that one. Collective if there is one."""
        seen, self._seen = self._seen, {}
        for number, row in enumerate(rows):
            if row.get("skipped") or (math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])):
                continue
            return rows[:number], (
                f"the training diverged at step {row['step']} (loss {row['loss']}, gradient norm {row['grad_norm']}; "
                f"not finite: {_words(self._found(*seen[row['step']]))}): lower optimizer.lr "
                f"({self._recipe.optimizer.lr}) or lengthen the warm-up"
            )
        return rows, None

    def spoiled(self, step: int, tensors: Mapping[str, Tensor]) -> str | None:
        """The sentence to stop with where the update of `step`, itself of finite gradients, left something in the
        run's state (`tensors` here) that is not finite, so that it must not be saved. Collective; reads them all."""
        bad = not_finite(tensors)
        any_bad = torch.tensor(float(bool(bad)), device=self._model.device)
        all_reduce_(any_bad, dist.ReduceOp.MAX)
        if not any_bad.item():
            return None
        found = self._first([], bad)
        assert found.tensor is not None, "a rank said that there is one"
        return (
            f"the update of step {step} left numbers that are not finite, first in "
            f"{found.tensor.removeprefix('model.')} on {ranks(found.ranks)}, so nothing is saved: lower optimizer.lr "
            f"({self._recipe.optimizer.lr}) or lengthen the warm-up"
        )

    def _found(self, loss: Tensor, parts: Sequence[ShardNorms]) -> _Found:
        bad = [names[at] for names, _, norms in parts for at, fine in enumerate(norms.isfinite().tolist()) if not fine]
        return self._first([dist.get_rank()] * (not math.isfinite(loss.item())), bad)

    def _first(self, losses: list[int], bad: Sequence[str]) -> _Found:
        """Combine what all ranks found. Collective."""
        layers = self._model.config.layer_names
        own = list(dict(self._model.named_parameters()))

        def place(name: str) -> tuple[int, int]:
            layer = next(number for number, layer in enumerate(layers) if f".{layer}." in f".{name}")
            return layer, next(number for number, parameter in enumerate(own) if name.endswith(parameter))

        first = min(bad, key=place, default=None)
        everyone = all_gather_json((losses, first and (place(first), first)))
        firsts = {rank: answer for rank, (_, answer) in enumerate(everyone) if answer}
        name = min(firsts.values())[1] if firsts else None
        holders = [rank for rank, (_, theirs) in firsts.items() if theirs == name]
        return _Found([rank for theirs, _ in everyone for rank in theirs], name, holders)


def skip_words(row: Mapping[str, Any]) -> str:
    """Return the line of the log for a step that was skipped."""
    if "loss_scale" in row:
        return f"skipped step {row['step']:,}: overflow under loss scale {row['loss_scale']:,.10g}"
    found = _Found(row["bad_loss_ranks"], row["bad_gradient"], row["bad_ranks"])
    return f"skipped step {row['step']:,}: not finite: {_words(found)}"


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of those whose parts on this rank hold something that is not finite. Waits for the device."""
    alike: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    parts = {name: local(tensor.detach()) for name, tensor in tensors.items()}
    for name, part in parts.items():
        if part.numel() and part.is_floating_point():
            alike.setdefault((part.device, part.dtype), []).append(name)
    bad = []
    for names in alike.values():
        largest = torch.stack(torch._foreach_norm([parts[name] for name in names], ord=math.inf))
        bad += [name for name, fine in zip(names, largest.isfinite().tolist(), strict=True) if not fine]
    return [name for name in tensors if name in set(bad)]


def _words(found: _Found) -> str:
    parts = []
    if found.losses:
        parts.append(f"the loss on {ranks(found.losses)}")
    if found.tensor is not None:
        parts.append(f"the gradient of {found.tensor} on {ranks(found.ranks)}")
    return " and ".join(parts) or "the norm of all gradients together"
