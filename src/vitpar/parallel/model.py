"""One rank's part of a parallel model, with the one way to run a step on it, pipeline or not.

Loss convention: the sum over local samples divided by the *global* batch size, before backward. Gradients are then
summed over data-parallel ranks and micro-batches, never averaged.
"""

from collections import deque
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vitpar.models.config import IGNORED, ViTConfig
from vitpar.models.vit import ViT
from vitpar.parallel.data import free_gathered, gradient_sums, set_last_micro_batch
from vitpar.parallel.pipeline import build_schedule, pipeline_stage, receive_tokens, send_tokens
from vitpar.parallel.precision import Precision
from vitpar.strategy import Plan, batch_arithmetic


class ParallelModel:
    """The stages this rank holds and how to run them. Made by ``vitpar.parallel.parallelize``.

    Images go in on ranks where `takes_images`, logits and losses come out on ranks where `gives_logits`; the others
    pass None. Every call is collective over the ranks of the plan.
    """

    def __init__(
        self,
        config: ViTConfig,
        plan: Plan,
        mesh: DeviceMesh,
        stages: dict[int, ViT],
        batch_size: int,
        device: torch.device,
        numbers: Precision,
        label_smoothing: float,
    ) -> None:
        self.config, self.plan, self.mesh, self.stages, self.device, self.precision = (
            config,
            plan,
            mesh,
            stages,
            device,
            numbers,
        )
        self.batch_size, self.label_smoothing = batch_size, label_smoothing
        arithmetic = batch_arithmetic(plan, batch_size)
        self.microbatches = arithmetic.microbatches
        self.takes_images = 0 in stages
        self.gives_logits = plan.num_stages - 1 in stages
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        layers = [layer for stage in stages.values() for layer in stage.layers().values()]
        self._gradient_sums = gradient_sums(layers, mesh, self.microbatches)
        self._schedule = None
        if plan.pipeline_degree > 1:
            group = mesh["pp"].get_group()
            shape = (config, arithmetic.microbatch_size, numbers.compute, device, group)
            pipeline = [pipeline_stage(stage, index, plan.num_stages, *shape) for index, stage in stages.items()]
            self._schedule = build_schedule(plan, pipeline, self.microbatches, self.loss)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy summed over the samples here, divided by the global batch size.

        logits: [batch, classes]. labels: int64 [batch], IGNORED for none.
        """
        wide = logits if logits.dtype is torch.float64 else logits.float()
        total = F.cross_entropy(
            wide, labels, ignore_index=IGNORED, reduction="sum", label_smoothing=self.label_smoothing
        )
        return total / self.batch_size

    def forward_backward(self, images: Tensor | None, labels: Tensor, keys: Tensor | None = None) -> Tensor:
        """Gradients of one step, accumulated over the micro-batches and reduced over the data-parallel ranks.

        images: [local batch, channels, size, size], normalised, or None where not `takes_images`. labels: int64 [local
        batch].
        keys: int64 [local batch], the samples' random keys.
        Returns this rank's part of the loss (0-dim, detached; zero where not `gives_logits`): the sum over ranks that
        differ in their samples is the loss of the global batch.
        """
        for stage in self.stages.values():
            stage.train()
        keys = keys if self.config.stochastic else None
        losses: list[Tensor] = []
        if self._schedule is not None:
            args = (images,) if self.takes_images else ()
            kwargs = {} if keys is None else {"keys": keys}
            ends = {"target": labels, "losses": losses} if self.gives_logits else {}
            self._schedule.step(*args, return_outputs=False, **kwargs, **ends)
        else:
            (stage,) = self.stages.values()
            assert images is not None, "a model without pipeline takes images on every rank"
            parts = [
                x.chunk(self.microbatches) if x is not None else (None,) * self.microbatches
                for x in (images, labels, keys)
            ]
            for number, (part, target, key) in enumerate(zip(*parts, strict=True), start=1):
                set_last_micro_batch(stage, number == self.microbatches)
                loss = self.loss(stage(part, key), target)
                loss.backward()
                losses.append(loss)
        for total in self._gradient_sums:
            total.wait()
        if not losses:
            return torch.zeros((), device=self.device)
        return torch.stack(losses).sum().detach()

    @torch.no_grad()
    def predict(self, images: Tensor | None, batch: int) -> Tensor | None:
        """Logits [batch, classes] in evaluation mode, or None where not `gives_logits`.

        images: [batch, channels, size, size], or None where not `takes_images`. batch: images of this rank's part, any
        number that is the same on all ranks of a pipeline.
        """
        shape = (batch, self.config.tokens, self.config.width)
        x = images
        for index, stage in self.stages.items():
            stage.eval()
            if index > 0:
                x = receive_tokens(index, self.plan, self.mesh["pp"], shape, self.precision.compute, self.device)
            assert x is not None, "a rank that holds the stem needs images"
            x = torch.cat([stage(part) for part in x.split(-(-batch // self.microbatches))])
            if index < self.plan.num_stages - 1:
                self._sent.append(send_tokens(x, index, self.plan, self.mesh["pp"]))
        while len(self._sent) > len(self.stages):
            self._sent.popleft()[0].wait()  # the next batch may start while the last one is on its way
        return x if self.gives_logits else None

    def parameters_changed(self) -> None:
        """To be called after parameters were written other than by the optimizer: drops stale gathered copies."""
        while self._sent:
            self._sent.popleft()[0].wait()
        for stage in self.stages.values():
            free_gathered(stage)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters, sharded, under the names they have in the whole model."""
        for stage in self.stages.values():
            yield from stage.named_parameters()

    def replicas(self, tensor: Tensor) -> int:
        """How many ranks of the world hold the same part of this parameter or gradient."""
        shards = 1
        if isinstance(tensor, DTensor):
            for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
                shards *= size if not placement.is_replicate() else 1
        return dist.get_world_size() // self.plan.pipeline_degree // shards

    @property
    def sample_replicas(self) -> int:
        """How many ranks compute the logits of the same sample."""
        return self.plan.strategy.degree("tp")
