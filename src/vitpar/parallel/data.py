"""Data parallelism of every kind through ``fully_shard``: replicated (dp), sharded (fsdp) and both (HSDP).

It also carries mixed precision and the reduction of gradients, so it wraps models of one process as well.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def shard(module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy, *, reshard_after_forward: bool) -> None:
    """Apply ``fully_shard`` to one module so that gradients are *summed* over `mesh`, never averaged.

    mesh: one axis (shards the parameters) or two (replicate, shard), see ``vitpar.parallel.mesh.data_mesh``.
    """
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum


def set_last_micro_batch(root: nn.Module, last: bool) -> None:
    """Tell the wrapped modules under `root` whether the coming backward is the step's last: gradients are reduced
    only then."""
    assert isinstance(root, FSDPModule)
    root.set_is_last_backward(last)
    root.set_requires_gradient_sync(last)


def free_gathered(root: nn.Module) -> None:
    """Drop gathered parameters, so that the next forward reads the sharded ones again (after these were changed in
    place)."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
