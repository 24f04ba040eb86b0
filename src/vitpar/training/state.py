"""What a rank keeps for every element of its parameters, besides activations."""

import torch
import torch.distributed as dist

from vitpar.launch.world_group import all_reduce_
from vitpar.parallel import PRECISIONS, ParallelModel
from vitpar.training.optim.optimizer import local
from vitpar.training.recipe import Recipe


def state_bytes(recipe: Recipe) -> int:
    """Bytes kept for each element of a rank's parameters: the copies that `state_words` names.

    Muon keeps less for some elements than for others: this is what it keeps at most.
    """
    return (2 + moments(recipe)) * PRECISIONS[recipe.train.precision].parameters.itemsize


def state_size(model: ParallelModel, recipe: Recipe) -> tuple[int, int]:
    """Parameters of the whole model, and the bytes that the fullest rank keeps for its share (`state_bytes`)."""
    named = [p for _, p in model.named_parameters()]
    whole = torch.tensor(
        [sum(local(p).numel() / model.replicas(p) for p in named)], dtype=torch.float64, device=model.device
    )
    fullest = torch.tensor([float(sum(local(p).numel() for p in named))], dtype=torch.float64, device=model.device)
    all_reduce_(whole)
    all_reduce_(fullest, dist.ReduceOp.MAX)
    return round(whole.item()), int(fullest.item()) * state_bytes(recipe)


def moments(recipe: Recipe) -> int:
    """Copies of the parameters' size that are kept besides parameters and gradients: the optimizer's, and the running
    average."""
    return _moments(recipe) + bool(recipe.train.ema_decay)


def state_words(recipe: Recipe) -> str:
    """What these bytes hold: `parameters, gradients, adamw state in float32`."""
    kinds = ["parameters", "gradients"]
    if _moments(recipe):
        kinds.append(f"{recipe.optimizer.name} state{' (at most)' if recipe.optimizer.name == 'muon' else ''}")
    if recipe.train.ema_decay:
        kinds.append("running average")
    number = str(PRECISIONS[recipe.train.precision].parameters).removeprefix("torch.")
    return f"{', '.join(kinds)} in {number}"


def _moments(recipe: Recipe) -> int:
    """Numbers the optimizer remembers for each element, at most: muon's are 1 for matrices of blocks, 2 for others."""
    momentum = 1 if recipe.optimizer.momentum else 0
    return {"adamw": 2, "lamb": 2, "muon": 2, "sgd": momentum, "lars": momentum}[recipe.optimizer.name]
