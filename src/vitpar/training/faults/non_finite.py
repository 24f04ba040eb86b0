"""Steps whose loss or gradients are not finite: how the run treats them, and where the first such number was.

Unless the loss is scaled or `faults.non_finite = "skip"` is set, nothing is read from the device until the log interval
ends. The norms of each gradient, which locate the number, are computed anyway and kept until then.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from vitpar.launch.world_group import all_gather_json, all_reduce_
from vitpar.parallel import ParallelModel
from vitpar.recipe import Recipe
from vitpar.sharded import local
from vitpar.text import count, ranks
from vitpar.training.optim.loss_scale import LossScaler
from vitpar.training.optim.norms import ShardNorms


class _Culprits(NamedTuple):
    """Place of the numbers that are not finite."""

    losses: list[int]
    """Ranks whose loss is not finite."""
    tensor: str | None
    """First tensor, in the model's order, that is not finite; None if there is none."""
    ranks: list[int]
    """Ranks whose first such tensor this is."""


class NonFinite:
    """Watch for steps of a run that are not finite. All ranks have one, get the same input and return the same.

    scaler: scale of the loss, None if it is not scaled. With one, the scaler handles overflows, and the run only stops
    if the scale cannot fall.
    """

    def __init__(self, recipe: Recipe, model: ParallelModel, scaler: LossScaler | None) -> None:
        self._recipe, self._model, self._scaler = recipe, model, scaler
        self.waits = scaler is not None or recipe.faults.non_finite == "skip"
        """Whether each step is checked before its update. The host then waits for the device."""
        self._seen: dict[int, tuple[Tensor, Sequence[ShardNorms]]] = {}
        self._in_a_row = 0
        self._last = ""

    def look(self, step: int, loss: Tensor, parts: Sequence[ShardNorms], norm: Tensor) -> dict[str, Any]:
        """Check a step, and return what its row of metrics says of it. Collective at a step that is skipped.

        Returns `skipped` and more if steps may be skipped; else an empty dict.

        loss: this rank's part of the loss.
        parts: norms of this rank's gradient shards.
        norm: norm of all gradients.
        """
        if not self.waits:
            self._seen[step] = loss, parts
            return {}
        skipped = not math.isfinite(norm.item())  # waits for the device
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if self._scaler:
            scale = self._scaler.scale
            self._scaler.update(skipped)
            return {"loss_scale": scale, "skipped": skipped}
        if not skipped:
            return {"skipped": False}
        culprits = self._culprits(loss, parts)
        self._last = _words(culprits)
        return {
            "skipped": True,
            "bad_loss_ranks": culprits.losses,
            "bad_gradient": culprits.tensor,
            "bad_ranks": culprits.ranks,
        }

    def stuck(self, step: int, last: bool = False) -> str | None:
        """Return the sentence to stop with after `step`, if skipping on is useless or it is the last; else None."""
        if self._scaler:
            overflows = (
                f"float16 still overflows at step {step} with {self._scaler.floor}, so the loss scale cannot fall: "
                f"{self._remedy(step)}; or lower that, or set train.precision to bf16"
            )
            return overflows if self._scaler.exhausted else None
        if last and self._in_a_row == step:
            return f"every step was skipped (not finite: {self._last}): {self._remedy(step)}"
        if self._in_a_row < self._recipe.faults.max_skipped:
            return None
        return (
            f"{count(self._in_a_row, 'step')} in a row were skipped, the last at step {step} (not finite: "
            f"{self._last}): {self._remedy(step)}, or raise faults.max_skipped"
        )

    def until_diverged(self, rows: Sequence[dict[str, Any]]) -> tuple[Sequence[dict[str, Any]], str | None]:
        """Return the `rows` before the first that is not finite and was not skipped, and the sentence to stop with.

        The sentence is None if there is no such row. Collective if there is one.
        """
        seen, self._seen = self._seen, {}
        for number, row in enumerate(rows):
            if row.get("skipped") or (math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])):
                continue
            return rows[:number], (
                f"the training diverged at step {row['step']} (loss {row['loss']}, gradient norm {row['grad_norm']}; "
                f"not finite: {_words(self._culprits(*seen[row['step']]))}): {self._remedy(row['step'])}"
            )
        return rows, None

    def spoiled(self, step: int, tensors: Mapping[str, Tensor]) -> str | None:
        """Return the sentence to stop with if the state after `step` is not finite; else None. Collective.

        The gradients of the step were finite, but its update left such numbers, which must not be saved. Reads all of
        the state.

        tensors: this rank's state of the run.
        """
        bad = not_finite(tensors)
        any_bad = torch.tensor(float(bool(bad)), device=self._model.device)
        all_reduce_(any_bad, dist.ReduceOp.MAX)
        if not any_bad.item():
            return None
        culprits = self._first([], bad)
        assert culprits.tensor is not None, "a rank said that there is one"
        return (
            f"the update of step {step} produced non-finite numbers, first in "
            f"{culprits.tensor.removeprefix('model.')} on {ranks(culprits.ranks)}, so nothing is saved: "
            f"{self._remedy(step + 1)}"
        )

    def _remedy(self, step: int) -> str:
        """Return what to do about numbers of `step` that are not finite. Without an update before it, no rate helps."""
        if step > max(self._in_a_row, 1):
            return f"lower optimizer.lr ({self._recipe.lr:g}) or lengthen the warm-up"
        return f"no update was done yet, so check the data, data.std {[*self._recipe.data.std]} and model.weights"

    def _culprits(self, loss: Tensor, parts: Sequence[ShardNorms]) -> _Culprits:
        bad = [names[at] for names, _, norms in parts for at, fine in enumerate(norms.isfinite().tolist()) if not fine]
        return self._first([dist.get_rank()] * (not math.isfinite(loss.item())), bad)

    def _first(self, losses: list[int], bad: Sequence[str]) -> _Culprits:
        """Combine the findings of all ranks. Collective."""
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
        return _Culprits([rank for theirs, _ in everyone for rank in theirs], name, holders)


def skip_words(row: Mapping[str, Any]) -> str:
    """Return the line of the log for a skipped step."""
    if "loss_scale" in row:
        return f"skipped step {row['step']:,}: overflow under loss scale {row['loss_scale']:,.10g}"
    culprits = _Culprits(row["bad_loss_ranks"], row["bad_gradient"], row["bad_ranks"])
    return f"skipped step {row['step']:,}: not finite: {_words(culprits)}"


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors whose local parts are not finite. Waits for the device."""
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


def _words(culprits: _Culprits) -> str:
    parts = []
    if culprits.losses:
        parts.append(f"the loss on {ranks(culprits.losses)}")
    if culprits.tensor is not None:
        parts.append(f"the gradient of {culprits.tensor} on {ranks(culprits.ranks)}")
    return " and ".join(parts) or "the global gradient norm"
