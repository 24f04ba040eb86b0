"""Data parallelism of every kind through ``fully_shard``: replicated (dp), sharded (fsdp) and both (HSDP).

It also carries mixed precision and, under tensor parallelism, the placement of gradients, so it wraps models without a
data-parallel axis as well where there is any of this to do.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


def shard(module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy, *, reshard_after_forward: bool) -> None:
    """Apply ``fully_shard`` to one module so that gradients are *summed* over `mesh`, never averaged.

    mesh: one axis (shards the parameters) or two (replicate, shard), see ``vitpar.parallel.mesh.data_mesh``.
    A plain module on a mesh of one rank stays as it is when it computes in its own precision: ``fully_shard`` would
    only copy its parameters and gradients, a tenth of a small model's step.
    """
    split = any(isinstance(parameter, DTensor) for parameter in module.parameters())
    if mesh.size() == 1 and not split and policy == MixedPrecisionPolicy():
        return
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum


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
