"""Which precision ``train.precision = "auto"`` stands for: decided here, once, before a plan is validated."""

from vitpar.errors import RecipeError
from vitpar.training.recipe.recipe import Recipe

BF16_CAPABILITY = (8, 0)
"""The least compute capability of a CUDA device that computes in bf16 (Ampere); older ones only emulate it."""


def resolve_precision(recipe: Recipe, device: str) -> Recipe:
    """Return `recipe` with automatic precision resolved for a kind of device.

    A recipe that names its precision is returned as it is. On CUDA all of this machine's devices count, so that its
    ranks agree. Raises RecipeError for settings that do nothing in the precision.
    """
    if recipe.train.precision != "auto":
        return recipe
    return recipe.with_precision(native_precision(device))


def native_precision(device: str) -> str:
    """Return bf16 for CUDA devices that compute in it, else fp32."""
    if device != "cuda":
        return "fp32"
    import torch

    devices = range(torch.cuda.device_count())
    enough = all(torch.cuda.get_device_capability(index) >= BF16_CAPABILITY for index in devices)
    return "bf16" if enough else "fp32"


def refuse_disagreement(recipe: Recipe) -> None:
    """Raise RecipeError where ranks of unlike machines resolved automatic precision to different ones. Collective."""
    from vitpar.launch.world_group import all_gather_json

    names = sorted(set(all_gather_json(recipe.train.precision)))
    if len(names) > 1:
        raise RecipeError(
            f"train.precision is auto, which is {' on some machines and '.join(names)} on others: name one with "
            "--precision"
        )


def planned_precision(recipe: Recipe, known: str | None, device: str) -> Recipe:
    """Return `recipe` with automatic precision resolved for planning, as a training on `device` would resolve it.

    known: the precision that the model was profiled in, or the best that a cluster's data sheet has rates for; None
    where nobody knows.
    """
    return recipe.with_precision(known if known == "bf16" and device == "cuda" else "fp32")
