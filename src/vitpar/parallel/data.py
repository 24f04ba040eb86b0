"""Data parallelism: replicated, sharded, or both.

dp replicates, +zero1 and +zero2 also shard optimizer state and gradients, fsdp shards parameters, dp with fsdp is HSDP.

``vitpar.strategy.execution`` decides for each layer what is gathered and reduced, and when. ``fully_shard`` does all
sharding and offloading. For layers that need neither it would only copy every parameter and gradient several times per
step (a third of a small model's step). Such layers stay plain modules: ``vitpar.parallel.precision`` makes their 16-bit
copies, and `GradientSum` sums their gradients.

Exception: schedules with a separate backward for weights look for gradients at the tensors that the forward used. There
``fully_shard`` makes the 16-bit copies.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from vitpar.parallel.mesh import partial_group, size
from vitpar.sharded import sharded_as, to_local
from vitpar.strategy.execution import LayerExecution

BUCKET_MB = 4.0
"""Default size in MiB up to which gradients of neighbouring layers share a message.

Every message has a start-up time, however small it is.
"""


def shard(
    layer: nn.Module,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    execution: LayerExecution,
    complete: Collection[nn.Parameter],
) -> None:
    """Apply ``fully_shard`` to a layer over the data-parallel axes of `mesh`, the layer's mesh.

    complete: parameters that stay complete on every rank.
    """
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if execution.offloaded else OffloadPolicy()
    settings: dict[str, Any] = {"ignored_params": set(complete)} if complete else {}
    settings |= {"reshard_after_forward": execution.reshard_after_forward, "offload_policy": offload}
    _fully_shard(layer, mesh, policy, **settings)


def shard_stage(stage: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Apply ``fully_shard`` to a stage that contains wrapped layers, without giving it any parameters.

    upstream: the stage itself must be an FSDP module too. Otherwise pipeline schedules reduce gradients once per
    micro-batch, and zero-bubble schedules fail ("data is not allocated yet"). It must not take the parameters of plain
    layers, because ``fully_shard`` fails on overlapping meshes.
    """
    _fully_shard(stage, mesh, policy, reshard_after_forward=False, ignored_params=set(stage.parameters()))


def _fully_shard(module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy, **settings: Any) -> None:
    """Apply ``fully_shard`` so that gradients are *summed*, never averaged."""
    axes = mesh["replicate", "shard"] if size(mesh, "replicate") > 1 else mesh["shard"]  # the former as HSDP
    fully_shard(module, mesh=axes, mp_policy=policy, **settings)
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum


class GradientSum:
    """All-reduce of gradients of plain layers, in one message.

    It starts when the step's last backward has produced the last of these gradients, and overlaps with the backward of
    the earlier layers.

    parameters: those whose gradients are summed.
    group: ranks to sum over.
    backwards: number of backwards in a step, one per micro-batch; None if the schedule computes gradients where hooks
        do not see them. Then `start` starts the all-reduce.
    dtype: data type of the message.
    """

    def __init__(
        self, parameters: Sequence[Tensor], group: dist.ProcessGroup, backwards: int | None, dtype: torch.dtype
    ) -> None:
        self._parameters, self._group, self._dtype = parameters, group, dtype
        self._expected = self._missing = (backwards or 0) * len(self._parameters)
        self._running: dist.Work | None = None
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._accumulated)
            for parameter in (self._parameters if backwards is not None else ())
        ]

    def _accumulated(self, parameter: Tensor) -> None:
        self._missing -= 1
        if self._missing == 0:
            self._missing = self._expected
            self._start()

    def _start(self) -> None:
        gradients = [local_gradient(p) for p in self._parameters]
        # Each gradient is read once and written once. Gradients that are views of a message from the start (DDP's
        # gradient_as_bucket_view) save nothing: the first backward of a step would read both and write the sum, or copy
        # as here, instead of keeping the tensor that the product has written.
        if gradients[0].dtype is self._dtype:
            self._total = torch.cat([gradient.flatten() for gradient in gradients])
        else:
            self._total = gradients[0].new_empty(sum(gradient.numel() for gradient in gradients), dtype=self._dtype)
            torch._foreach_copy_(self._parts(), gradients)
        self._running = dist.all_reduce(self._total, group=self._group, async_op=True)
        if self._total.dtype is self._parameters[0].dtype:
            # From here on the gradients are views of the message, so that the memory backward wrote to is freed at
            # once and the result needs no copy.
            for parameter, part in zip(self._parameters, self._parts(), strict=True):
                parameter.grad = sharded_as(parameter, part)

    def _parts(self) -> list[Tensor]:
        """Return views of the message in the shapes of the local parameters."""
        tensors = [to_local(p) for p in self._parameters]
        parts = self._total.split([tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]

    @property
    def message(self) -> tuple[dist.ProcessGroup, int]:
        """Process group and bytes of the all-reduce."""
        return self._group, _elements(self._parameters) * self._dtype.itemsize

    def drop(self) -> None:
        """Sum nothing from here on."""
        for hook in self._hooks:
            hook.remove()

    def start(self) -> None:
        """Start the all-reduce if backward did not. Call it after the step's last backward, before `wait`."""
        if self._running is None:
            assert not self._expected, "not every parameter of the layers has a gradient"
            self._start()

    def wait(self) -> None:
        """Wait until the gradients are the sums."""
        assert self._running is not None
        self._running.wait()
        if self._total.dtype is not self._parameters[0].dtype:
            torch._foreach_copy_([local_gradient(p) for p in self._parameters], self._parts())
        self._running = None
        del self._total


def local_gradient(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter's gradient."""
    assert parameter.grad is not None, "a parameter has no gradient"
    return to_local(parameter.grad)


def gradient_sums(
    layers: Iterable[tuple[nn.Module, DeviceMesh]],
    partial: Collection[Tensor],
    complete: Collection[Tensor],
    backwards: int | None,
    dtype: torch.dtype,
    bucket_cap_mb: float | None = None,
) -> list[GradientSum]:
    """Return the gradient sums of layers that ``fully_shard`` does not wrap, given in order with their meshes.

    Gradients are summed over replicas, partial ones over these and the tensor-parallel axis at once. Frozen ones have
    none.

    partial: parameters of these layers whose gradients are partial over the axis j.
    complete: tables, whose gradients are summed elsewhere (``vitpar.parallel.shared``).
    dtype: data type to sum in.
    bucket_cap_mb: largest message in MiB that gradients of neighbouring layers share; None for `BUCKET_MB`.
    """
    cap = (BUCKET_MB if bucket_cap_mb is None else bucket_cap_mb) * 2**20 / dtype.itemsize
    over_j, elsewhere = {id(parameter) for parameter in partial}, {id(parameter) for parameter in complete}
    buckets: list[tuple[dist.ProcessGroup, list[Tensor]]] = []
    open_: dict[dist.ProcessGroup, list[Tensor]] = {}
    for layer, mesh in reversed(list(layers)):  # the order in which backward reaches them
        mine: dict[dist.ProcessGroup, list[Tensor]] = {}
        for parameter in (p for p in layer.parameters() if p.requires_grad and id(p) not in elsewhere):
            if id(parameter) in over_j:
                mine.setdefault(partial_group(mesh), []).append(parameter)
            elif size(mesh, "replicate") > 1:
                mine.setdefault(mesh.get_group("replicate"), []).append(parameter)
        for group, parameters in mine.items():
            if group not in open_ or _elements(open_[group]) + _elements(parameters) > cap:
                open_[group] = []
                buckets.append((group, open_[group]))
            open_[group] += parameters
        if mine:  # only neighbours share a message: one of far layers would start late
            open_ = {group: open_[group] for group in mine}
    return [GradientSum(bucket, group, backwards, dtype) for group, bucket in buckets]


def _elements(parameters: Iterable[Tensor]) -> int:
    return sum(to_local(parameter).numel() for parameter in parameters)


def prefetch(forward: Sequence[nn.Module], backward: Sequence[nn.Module], ahead: int | None) -> None:
    """Let every wrapped layer prefetch the parameters of the layers that follow it, in forward and in backward.

    forward: wrapped layers of a stage, in order.
    backward: those that have a backward: all from one on.
    ahead: number of layers; None for FSDP2's default.
    """
    forwards, backwards = _wrapped(forward), _wrapped(backward)
    if ahead is not None:
        for index, layer in enumerate(forwards):
            layer.set_modules_to_forward_prefetch(forwards[index + 1 : index + 1 + ahead])
        for index, layer in enumerate(backwards):
            layer.set_modules_to_backward_prefetch(backwards[max(0, index - ahead) : index][::-1])
    if backwards and len(backwards) < len(forwards):
        # upstream: by default FSDP2 gathers the layer below, although it has no backward. An empty list means the
        # default; a layer that fetches itself fetches nothing.
        backwards[0].set_modules_to_backward_prefetch(backwards[:1])


def _wrapped(layers: Iterable[nn.Module]) -> list[FSDPModule]:
    return [layer for layer in layers if isinstance(layer, FSDPModule)]


def reduce_always(root: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Reduce the gradients of the wrapped `layers` at every micro-batch, even if gradient sync is off for `root`.

    Pipeline schedules and `set_last_micro_batch` switch it off recursively through ``root.set_requires_gradient_sync``.
    That method is replaced on the instance, because a setting on the layers alone would be overwritten.
    """
    eager = _wrapped(layers)
    assert isinstance(root, FSDPModule)
    set_all = root.set_requires_gradient_sync

    def set_the_others(requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        set_all(requires_gradient_sync, recurse=recurse)
        for layer in eager:
            layer.set_requires_gradient_sync(True)

    root.set_requires_gradient_sync = set_the_others  # type: ignore[method-assign]


def set_last_micro_batch(root: nn.Module, last: bool, kept: Iterable[nn.Module]) -> None:
    """Tell the wrapped modules under `root` whether the coming backward is the step's last.

    Only in the last backward are gradients reduced.
    kept: layers that keep their gathered parameters between micro-batches; they free them after the last backward.
    """
    if isinstance(root, FSDPModule):
        root.set_is_last_backward(last)
        root.set_requires_gradient_sync(last)
    for layer in _wrapped(kept):
        layer.set_reshard_after_backward(last)


def free_gathered(root: nn.Module) -> None:
    """Free gathered parameters under `root`: the next forward gathers the sharded ones, which were changed."""
    for module in _wrapped(root.modules()):
        module.reshard()
