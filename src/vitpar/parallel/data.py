"""Data parallelism: replicated (dp), sharded (fsdp) and both (HSDP).

``fully_shard`` does all of it. It also carries mixed precision and, under tensor parallelism, the placement of
gradients, so it wraps layers without a data-parallel axis as well. Where none of this is needed, because every rank
keeps whole parameters and computes in their precision, it would only copy every parameter and gradient several times a
step (a third of a small model's step): such layers stay plain modules, and `GradientSum` adds up their gradients.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


def shard(module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy, *, reshard_after_forward: bool) -> None:
    """Apply ``fully_shard`` to one module so that gradients are *summed* over `mesh`, never averaged.

    mesh: one axis (shards the parameters) or two (replicate, shard), see ``vitpar.parallel.mesh.data_mesh``.
    Leaves a module alone that has nothing to gain (see above).
    """
    split = any(isinstance(parameter, DTensor) for parameter in module.parameters())
    if mesh.shape[-1] == 1 and not split and policy == MixedPrecisionPolicy():
        return
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum


class GradientSum:
    """Sums the gradients of a plain layer over `group` as soon as the step's last backward has reached them, while
    backward goes on through the layers before it.

    backwards: how many of them a step has, one for every micro-batch.
    """

    def __init__(self, layer: nn.Module, group: dist.ProcessGroup, backwards: int) -> None:
        self._parameters, self._group = list(layer.parameters()), group
        self._expected = self._missing = backwards * len(self._parameters)
        self._running: tuple[Tensor, dist.Work] | None = None
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._accumulated)

    def _accumulated(self, parameter: Tensor) -> None:
        self._missing -= 1
        if self._missing == 0:
            self._missing = self._expected
            total = torch.cat([p.grad.flatten() for p in self._parameters])  # one message a layer
            work = dist.all_reduce(total, group=self._group, async_op=True)
            self._running = total, work

    def wait(self) -> None:
        """Must follow the step's last backward: from here on the gradients are the sums."""
        assert self._running is not None, "not every parameter of the layer has a gradient"
        total, work = self._running
        work.wait()
        parts = total.split([p.numel() for p in self._parameters])
        for parameter, part in zip(self._parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        self._running = None


def gradient_sums(layers: Iterable[nn.Module], mesh: DeviceMesh, backwards: int) -> list[GradientSum]:
    """For those of `layers` that ``fully_shard`` has not taken, over the dp axis of `mesh`."""
    if mesh["dp"].size() == 1:
        return []
    plain = [layer for layer in layers if not any(isinstance(p, DTensor) for p in layer.parameters())]
    return [GradientSum(layer, mesh["dp"].get_group(), backwards) for layer in plain]


def set_last_micro_batch(root: nn.Module, last: bool) -> None:
    """Tell the wrapped modules under `root` whether the coming backward is the step's last: gradients are reduced
    only then."""
    if isinstance(root, FSDPModule):
        root.set_is_last_backward(last)
        root.set_requires_gradient_sync(last)


def free_gathered(root: nn.Module) -> None:
    """Drop gathered parameters, so that the next forward reads the sharded ones again (after these were changed in
    place)."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
