"""AdamW in one pass: clipping, update, 16-bit copies and running average (``vitpar.kernels.adamw``).

`choose_implementation` decides where it is used, and `fits` for which parameters.

The result is that of torch's AdamW up to rounding. State of each shard has torch's names: `step`, `exp_avg`,
`exp_avg_sq`.
"""

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from vitpar.errors import RecipeError
from vitpar.launch.world_group import all_gather_json
from vitpar.parallel.precision import PRECISIONS
from vitpar.recipe.sections.training import OptimizerSection
from vitpar.training.optim.layerwise import Group, OverShards

DEVICES = ("cuda",)
"""Types of devices that Triton has a compiler for. A CPU has only its interpreter, which is for tests."""


class ImplementationChoice(NamedTuple):
    """Implementation of the update, and why it is not one pass."""

    name: str
    """triton for one pass, else that of the settings."""
    because: str | None = None
    """Reason why it is not one pass although that is the default on this device; None otherwise."""


def choose_implementation(
    settings: OptimizerSection, precision_name: str, device: torch.device
) -> ImplementationChoice:
    """Return the implementation of the settings, with triton for auto where one pass works. Collective.

    It works for AdamW with float32 parameters, on GPUs where Triton works on every rank: replicas must be equal.

    Raises RecipeError if the implementation is triton and does not work.
    """
    if settings.name != "adamw" or settings.implementation not in ("auto", "triton"):
        return ImplementationChoice(settings.implementation)
    fault, default = None, False
    if device.type not in DEVICES:
        fault = f"it does not run on a {device.type} device"
    elif PRECISIONS[precision_name].parameters is not torch.float32:
        fault = f"train.precision {precision_name} has no float32 parameters"
    else:
        default = True
        fault = next(filter(None, all_gather_json(_kernel_fault(device))), None)
    if fault is None:
        return ImplementationChoice("triton")
    if settings.implementation == "triton":
        raise RecipeError(f"optimizer.implementation is triton, but {fault}: use auto")
    return ImplementationChoice(settings.implementation, fault if default else None)


def _kernel_fault(device: torch.device) -> str | None:
    """Return the reason why the kernel does not run on `device`, None if it does."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    from vitpar.kernels.adamw import fault

    return fault(device)


def fits(shards: Iterable[Tensor]) -> bool:
    """Return whether one pass can update these shards: float32, contiguous and on a device, so not offloaded."""
    return all(p.dtype is torch.float32 and p.is_contiguous() and p.device.type in DEVICES for p in shards)


class OnePassAdamW(OverShards):
    """AdamW over local shards in one pass.

    Settings: `lr`, `betas` and `eps`, which all groups share, and `weight_decay`.

    Source: "Decoupled Weight Decay Regularization" (arXiv 1711.05101), algorithm 2.
    """

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        factor: Tensor | None = None,
        copies: Mapping[Tensor, Tensor] = {},
        averages: Mapping[Tensor, Tensor] = {},
        average_decay: float = 0.0,
    ) -> None:
        """Update all shards that have a gradient.

        factor: 0-dim float32 tensor on the device that multiplies all gradients; None for 1.
        copies: tensors that take the 16-bit copies of updated shards, by shard.
        averages: running averages of shards, by shard: ``average = decay · average + (1 - decay) · parameter``.
        """
        from vitpar.kernels.adamw import adamw_

        # One launch for all groups and layers whose tensors have the same types.
        alike: dict[object, list[tuple[Tensor, Group]]] = {}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    copy = copies.get(p)
                    kind = p.device, p.grad.dtype, None if copy is None else copy.dtype, p in averages
                    alike.setdefault(kind, []).append((p, group))
        for pairs in alike.values():
            shards, groups = [p for p, _ in pairs], [group for _, group in pairs]
            steps, means, squares = self._remembered(shards, "step", "exp_avg", "exp_avg_sq")
            torch._foreach_add_(steps, 1)
            adamw_(
                shards,
                [p.grad.contiguous() for p in shards if p.grad is not None],
                means,
                squares,
                [copies[p] for p in shards if p in copies],
                [averages[p] for p in shards if p in averages],
                factor,
                [step.item() for step in steps],
                [group["lr"] for group in groups],
                [group["weight_decay"] for group in groups],
                *self.defaults["betas"],
                self.defaults["eps"],
                average_decay,
            )
