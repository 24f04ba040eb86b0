"""Layers of a model on one device, to run forward and backward in a fake process group.

Messages are packed and unpacked, but not sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from vitpar.models.config import ModelConfig
from vitpar.models.derived import Excerpt
from vitpar.models.layers import given_sides, zero_sides
from vitpar.models.loss import CrossEntropy, Loss
from vitpar.parallel import Execution, ParallelModel, parallelize
from vitpar.planner.measure.device import live_bytes
from vitpar.planner.profile.profiles import LayerKind
from vitpar.strategy import output_layout, parse, token_layout, validate
from vitpar.strategy.layout import image_layout, row_parts
from vitpar.strategy.validate import unsplittable
from vitpar.tasks.mae import MAE
from vitpar.tasks.text import MaskedLanguage


@contextmanager
def pretended(ranks: int) -> Iterator[None]:
    """Pretend to be the first rank in a process group of `ranks` whose other ranks do not exist."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    # Fake receives leave uninitialised memory, whose denormal numbers would make arithmetic slow.
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        dist.destroy_process_group()


@contextmanager
def built(
    config: ModelConfig, execution: Execution, mesh: str, device: torch.device, blocks: tuple[str, ...] | None = None
) -> Iterator[ParallelModel]:
    """Yield the first rank's part of a model, in a fake process group.

    execution: settings of a step, with any batch size.
    mesh: the strategy as a string, without a pipeline.
    blocks: names of the blocks that it has; None for one of each kind that the strategy can split.
    """
    strategy = parse(mesh).strategy
    if blocks is None:
        blocks = tuple(layer.name for layer in config.block_kinds if not unsplittable(layer, strategy))
    excerpt, smallest = Excerpt(config, blocks), row_parts(strategy)
    plan = validate(parse(mesh), excerpt, smallest)
    # The outputs are logits of tokens or crops, logits of classes, or pixels of patches.
    loss: Loss = MaskedLanguage() if len(config.output_shape) > 1 else CrossEntropy()
    loss = MAE() if config.FAMILY in MAE.FAMILIES else loss
    with pretended(plan.world_size):
        yield parallelize(excerpt, plan, replace(execution, batch_size=smallest), device, loss)


class LayerBench:
    """One layer of a model, to run forward and backward on any number of rows.

    Rows are images of a micro-batch that one tensor-parallel group works on. A layer under ``fully_shard`` keeps its
    gathered parameters and does not reduce gradients, unless `syncing(True)` was called.
    """

    def __init__(self, model: ParallelModel, kind: LayerKind) -> None:
        (stage,) = model.stages.values()
        self._name = model.config.kinds[kind].name
        self.layer, self.kind, self._model = stage.layers()[self._name], kind, model
        self._strategy = model.plan.strategy
        self.groups = self._strategy.degree("fsdp")
        self.unit = token_layout(self._strategy)[0].rows // self.groups
        self._pending: list[tuple[Tensor, Tensor]] = []
        self.syncing(False)
        model.drop_gradient_sums()
        stage.train()

    def syncing(self, sync: bool) -> None:
        """Set whether backward frees gathered parameters and reduces gradients, as in a step's last backward."""
        if isinstance(self.layer, FSDPModule):
            self.layer.set_reshard_after_forward(False)
            self.layer.set_reshard_after_backward(sync)
            self.layer.set_requires_gradient_sync(sync)

    def prepare(self, rows: int) -> None:
        """Create this rank's input, targets and keys for `rows` rows of a tensor-parallel group."""
        config, total = self._model.config, rows * self.groups
        taken = self.layer.description.takes
        if taken is None:
            here = len(image_layout(self._strategy)[0].row_range(total))
            shape: tuple[int, ...] = here, *config.input.shape
        else:
            part = token_layout(self._strategy)[0]
            here = len(part.row_range(total))
            shape = here, taken.tokens, len(part.feature_range(taken.features))
        device, dtype = self._model.device, self._model.precision.compute
        if taken is None:
            self._x = random_input(shape, config, dtype, device)
        else:
            self._x = torch.randn(shape, dtype=dtype, device=device)
        # The group computes samples of which each rank may have a part.
        group = slice(len(output_layout(self._strategy)[0].row_range(total)))
        sides = zero_sides(config, group.stop, self._model.device)
        self._sides = given_sides(self.layer, None, sides, slice(here), group)
        self._targets = targets_for(self._model, total, group.stop)
        self._gradient: Tensor | None = None  # of the output; the head ends in the loss, which needs none

    def forward(self) -> None:
        """Run a forward; one backward must follow each."""
        x = self._x.detach().requires_grad_(not self.layer.description.first)
        if self.layer.description.last:
            y = self._model.loss(self.layer(x, **self._sides), self._targets)
        else:
            y = self.layer(x, **self._sides)
            if self._gradient is None:
                self._gradient = torch.randn_like(y)
        self._pending.append((x, y))

    def backward(self) -> None:
        """Run the backward of the last forward."""
        _, y = self._pending.pop()
        torch.autograd.backward(y, self._gradient)

    def backward_to_input(self) -> None:
        """Run the backward of the last forward without gradients of parameters."""
        x, y = self._pending.pop()
        torch.autograd.grad(y, x, self._gradient)

    def memory(self, rows: int) -> tuple[int, int]:
        """Return (bytes saved between forward and backward, peak of transient bytes above these in either)."""
        self.prepare(rows)
        self.forward()
        self.backward()  # allocates gradients, which the cost model counts separately
        with live_bytes(self._model.device) as live:
            self.forward()
            saved = live.now
            self.backward()
        return saved, live.most - saved


def targets_for(model: ParallelModel, batch: int, here: int) -> Tensor:
    """Return targets of zeros for `batch` samples over all ranks, of which this rank gives the outputs of `here`."""
    shape, dtype = model.config.output_shape, model.precision.compute
    if model.local_targets:
        return torch.zeros(here, *shape, dtype=dtype, device=model.device)
    return torch.zeros(batch, *shape[:-1], dtype=torch.int64, device=model.device)


def random_input(shape: tuple[int, ...], config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an input of the model: random images, or token ids of 0."""
    if config.input.dtype is None:
        return torch.randn(shape, dtype=dtype, device=device)
    return torch.zeros(shape, dtype=getattr(torch, config.input.dtype), device=device)
