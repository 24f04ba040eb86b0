"""Training with a fault on one rank, and a record of what each step changed there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import trained
from vitpar.errors import RecipeError
from vitpar.recipe import Recipe
from vitpar.sharded import local

WEIGHT = "blocks.1.mlp.fc1.weight"


def watched(
    device: torch.device,
    recipe: Recipe,
    folder: Path,
    value: float | None = None,
    rank: int = 0,
    steps: tuple[int, ...] = (),
    name: str = "",
) -> tuple[list[dict[str, Any]], str | None]:
    """Train with a fault on `rank` in `steps`; runs on every rank.

    Return the record of each step on this rank, and the error that stopped the run, if any.

    name: parameter whose reduced gradient gets `value`; "" for the rank's last one. "loss" multiplies the loss by
    `value`; "update" writes it into WEIGHT after the update. With a name, ranks read losses at the log interval only.
    """
    trainer = trained.trainer_of(recipe, folder)
    backward, step = trainer.model.forward_backward, trainer.step
    parameters, seen = dict(trainer.model.named_parameters()), list[dict[str, Any]]()

    def hit() -> bool:
        return value is not None and trainer.rank == rank and len(seen) + 1 in steps

    def kept() -> list[Tensor]:
        """Return copies of this rank's non-empty parameters, their moving averages and the optimizer state."""
        found = [local(p.detach()) for p in parameters.values()]
        found += list(trainer.ema.average.values()) if trainer.ema else []
        states = trainer.optimizer.torch_optimizer.state.values()
        found += [state for each in states for state in each.values() if isinstance(state, Tensor)]
        return [tensor.clone() for tensor in found if tensor.numel()]

    def spoilt(*args: Any) -> Tensor:
        loss = backward(*args)
        if hit() and name == "loss":
            return loss * value
        if hit() and name != "update":
            gradients = [p.grad for p in parameters.values() if local(p).numel()]
            local(parameters[name].grad if name else gradients[-1]).view(-1)[0] = value
        return loss

    def recorded(number: int, batch: Any) -> Any:
        before, scale = kept(), trainer.state.loss_scale
        result = step(number, batch)
        if hit() and name == "update":
            local(parameters[WEIGHT].detach()).view(-1)[0] = value
        after = kept()
        equal = [torch.equal(old, new) for old, new in zip(before, after, strict=False)]
        seen.append(
            {
                "same": len(before) == len(after) and all(equal),  # the first update creates the optimizer state
                "changed": not any(equal),
                "finite": all(bool(tensor.isfinite().all()) for tensor in after),
                "dropped": all(p.grad is None for p in parameters.values() if local(p).numel()),
                "scale": scale and scale.scale,
            }
        )
        return result

    trainer.model.forward_backward, trainer.step = spoilt, recorded  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        if name:
            patch.setattr("vitpar.training.trainer.LOOK_S", 1e9)
        try:
            trainer.run()
        except RecipeError as error:
            return seen, str(error)
    return seen, None
