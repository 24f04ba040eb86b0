"""1-D tensor parallelism: the splits that layers declare, as PyTorch's parallel styles.

| split                  | weight   | input             | output                      |
|------------------------|----------|-------------------|-----------------------------|
| column                 | Shard(0) | replicated        | features sharded            |
| row                    | Shard(1) | features sharded  | replicated (one all-reduce) |
| row_replicated_input   | Shard(1) | replicated        | replicated (one all-reduce) |
| heads                  | whole    | heads sharded     | heads sharded               |

Parameters that no split names stay whole on every tp rank; their inputs are replicated, so their gradients are equal
there.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def _style(split: str) -> ParallelStyle:
    match split:
        case "column":
            return ColwiseParallel()
        case "row":
            return RowwiseParallel()
        case "row_replicated_input":
            return RowwiseParallel(input_layouts=Replicate())
        case "heads":
            # A norm over [batch, heads, tokens, head_dim] with dim 1 sharded: whole weights, gradients summed over tp.
            return SequenceParallel(sequence_dim=1, use_local_output=True)
    raise AssertionError(f"unknown split {split}")


def apply_tensor_parallel(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Split the parameters of `layer` over the one-axis `mesh` as its class declares."""
    plan = {}
    for name, split in layer.TENSOR_PARALLEL.items():
        owner, _, attribute = name.rpartition(".")
        module = getattr(layer.get_submodule(owner), attribute)
        if module is not None and not isinstance(module, nn.Identity):
            plan[name] = _style(split)
    if plan:
        parallelize_module(layer, mesh, plan)
    for name, split in layer.TENSOR_PARALLEL.items():
        if split == "row_replicated_input" and name in plan:
            # It may end a stage, whose output must be no view of a DTensor.
            layer.get_submodule(name).register_forward_hook(lambda module, args, output: output.clone())
