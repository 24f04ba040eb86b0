"""One rank's part of a parallel model, and its training step and evaluation, with a pipeline or without.

Loss convention: the sum over local samples divided by the *global* batch size, before backward. Gradients are then
summed over data-parallel ranks and micro-batches, never averaged. With mean losses and averaging, layers whose strategy
has no dp axis would get gradients 2 to 4 times too large, and the loss curve under AdamW would not show it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vitpar.errors import ModelError
from vitpar.launch.world_group import all_reduce_
from vitpar.models.config import ModelConfig
from vitpar.models.description import TensorSpec
from vitpar.models.layers import ResidualBlock
from vitpar.models.loss import Loss
from vitpar.models.roles import chunk_range
from vitpar.parallel.batch_part import BatchEvaluation, BatchPart
from vitpar.parallel.data import free_gathered, gradient_sums, set_last_micro_batch
from vitpar.parallel.mesh import tensor_mesh
from vitpar.parallel.phases import Phase, untimed
from vitpar.parallel.pipeline import Schedule, Stage, StageModule, build_schedule
from vitpar.parallel.precision import LowPrecisionParams, resolve_precision
from vitpar.parallel.shared import SharedSums, tables
from vitpar.parallel.tensor import PartialGradient, TensorSums
from vitpar.parallel.vocabulary import VocabularyPart, complete_logits
from vitpar.strategy import Plan, stage_layers
from vitpar.strategy.batch import smallest_microbatch
from vitpar.strategy.execution import Execution, LayerExecution


class ParallelModel:
    """This rank's pipeline stages and how to run them; made by ``vitpar.parallel.parallelize``.

    Ranks where `takes_images` pass their own rows of the batch (`image_rows`). Targets and keys are those of
    the complete batch, on every rank. Ranks where `gives_outputs` return outputs and losses. `forward_backward`,
    `global_loss` and `predict` are collective over all ranks of the plan.

    executions: rules of every layer of the model, by name (``Execution.layers``).
    pipe: mesh (pp, stage) over the world.
    meshes: mesh of each layer, by name.
    partial: parameters whose gradients are partial over tensor-parallel axes, by layer.
    sharing: mesh of the stages that hold each shared parameter (``vitpar.parallel.mesh.sharing_meshes``).
    loss: loss of a step.
    """

    def __init__(
        self,
        config: ModelConfig,
        plan: Plan,
        execution: Execution,
        executions: Mapping[str, LayerExecution],
        pipe: DeviceMesh,
        stages: dict[int, StageModule],
        meshes: dict[str, DeviceMesh],
        partial: Mapping[str, Sequence[PartialGradient]],
        sharing: Mapping[str, DeviceMesh | None],
        device: torch.device,
        loss: Loss,
    ) -> None:
        self.config, self.plan, self.execution, self.device = config, plan, execution, device
        self.pipe, self.stages, self.batch_size = pipe, stages, execution.batch_size
        self.precision = precision = resolve_precision(execution.precision, execution.reduce_dtype)
        self.loss_scale: float | Tensor = 1.0
        """Factor on the loss, and so on the gradients, before backward (fp16)."""
        self.keep_low_precision_gradients = False
        """Whether gradients of 16-bit copies stay in 16 bits where nothing is added to them."""
        self._loss = loss
        self.local_targets: bool = getattr(loss, "LOCAL_TARGETS", False)
        """Whether targets are those of this rank's outputs, not of the complete batch."""
        self._count: int | Tensor = self.batch_size
        self._measured: Tensor | None = None
        self.phase: Phase = untimed
        """Context manager that each part of a step runs in, by the part's name."""
        self.takes_images = 0 in stages
        self.gives_outputs = plan.num_stages - 1 in stages
        self._part = BatchPart(config, plan, self.batch_size, pipe.get_local_rank("stage"))
        self.batch = self._part.batch
        self._sample_replicas = len(self._part.output_copies)  # ranks that compute the same samples
        self._features = range(config.output_shape[-1])
        if getattr(loss, "DISTILLED", False) and len(config.classifiers) > 1:
            self._features = range(len(config.classifiers) * len(self._features))
            for stage in stages.values():
                if (classifying := stage.layers().get(config.last_layer.name)) is not None:
                    classifying.distilled_training = True
        self.vocabulary: VocabularyPart | None = None
        """This rank's part of the vocabulary, where outputs are logits that tensor parallelism splits."""
        head = config.last_layer
        axes = tensor_mesh(meshes[head.name]) if self.gives_outputs else None
        if axes is not None and any(part.role == "vocabulary_output" for part in head.parts):
            self._features = chunk_range(len(self._features), axes.size(), axes.get_local_rank())
            self.vocabulary = VocabularyPart(self._features.start, axes.get_group())
        layers = {name: layer for stage in stages.values() for name, layer in stage.layers().items()}
        self._kept = [layer for name, layer in layers.items() if not executions[name].reshard_after_backward]
        plain = {name: layer for name, layer in layers.items() if not executions[name].wrapped}
        # Schedules with a separate backward for weights do not trigger the hooks that count gradients.
        backwards = None if plan.splits_backward else self.batch.microbatches
        by_mesh = [(layer, meshes[name]) for name, layer in plain.items()]
        in_sums = [gradient.parameter for name in plain for gradient in partial[name]]
        complete = {parameter for layer in layers.values() for parameter in tables(layer)}
        self._gradient_sums = gradient_sums(
            by_mesh, in_sums, complete, backwards, precision.reduce, execution.communication.bucket_cap_mb
        )
        copied = [layer for name, layer in plain.items() if executions[name].low_precision_copies]
        self.low_precision_params = LowPrecisionParams(copied, precision.compute, complete)
        """16-bit copies of the parameters of layers without ``fully_shard``."""
        wrapped = [gradient for name in layers if name not in plain for gradient in partial[name]]
        self._tensor_sums = TensorSums(wrapped, device)
        self._shared_sums = SharedSums(
            config, dict(self.named_parameters()), sharing, execution.frozen, precision.parameters, device
        )
        self._evaluation = BatchEvaluation(plan, pipe, stages, self._part, precision.compute, device)
        self._executions = executions
        self._by_size: dict[int, tuple[list[TensorSpec], Schedule | None]] = {}
        self.take_image_size(config.image_size)

    def take_image_size(self, image_size: int) -> None:
        """Take images of `image_size` pixels from now on, which ``ModelConfig.resized`` must support. Collective."""
        if image_size not in self._by_size:
            sized = self.config if image_size == self.config.image_size else self.config.resized(image_size)
            assert sized is not None, f"{self.config.name} takes images of one size only"
            dtype, features = self.precision.compute, len(self._features)
            given = [sized.layers[names[-1]].gives for names in stage_layers(self.config, self.plan)]
            schedule = None
            if self.plan.pipeline_degree > 1:
                stages = []
                for index, stage in self.stages.items():
                    first, *_, last = [self._executions[name] for name in stage.layers()] * 2
                    shapes = self._part.of_stage(index, sized, given, features, dtype)
                    place = (self.plan.num_stages, *shapes, self.device, self.pipe.get_group("pp"))
                    has_gradient = last.backward != "nothing"
                    stages.append(Stage(stage, index, *place, passed=first.passes_gradient, given=has_gradient))
                schedule = build_schedule(self.plan, stages, self.batch.microbatches, self.loss)
            self._by_size[image_size] = given, schedule
        self._given, self._schedule = self._by_size[image_size]

    def set_drop_path(self, share: float) -> None:
        """Drop residual branches at `share` of the model's rates from now on."""
        for stage in self.stages.values():
            for layer in stage.layers().values():
                if isinstance(layer, ResidualBlock):
                    layer.set_drop_path(share)

    @property
    def _scales(self) -> bool:
        """Whether the loss is scaled. Multiplying by 1 would only launch kernels."""
        return isinstance(self.loss_scale, Tensor) or self.loss_scale != 1.0

    def image_rows(self, batch: int) -> list[int]:
        """Return the indices, among `batch` images over all ranks, of the images this rank takes, in order."""
        return self._part.rows(self._part.images, batch)

    def output_rows(self, batch: int) -> list[int]:
        """Return the indices, among `batch` images over all ranks, of the outputs on this rank, in order."""
        return self._part.rows(self._part.outputs, batch)

    @property
    def image_groups(self) -> list[list[int]]:
        """Ranks of the world that take images, grouped by those that take the same ones. Equal on all ranks."""
        return self._part.image_groups(self.pipe.mesh[0].tolist())

    @property
    def first_of_outputs(self) -> bool:
        """Whether this rank is the first of those that give the same outputs."""
        return self.gives_outputs and self._part.first_of_outputs

    @property
    def gradient_messages(self) -> list[tuple[dist.ProcessGroup, int]]:
        """Group and bytes of each gradient all-reduce that a step waits for, in order, but for ``fully_shard``'s."""
        return [*(total.message for total in self._gradient_sums), *self._tensor_sums.messages]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss summed over this rank's samples, over the number for the global batch, times `loss_scale`.

        Collective over the ranks of `vocabulary`.

        outputs: the head's, [this rank's rows, features], or [rows, tokens, this rank's part of the vocabulary].
        targets: those of the micro-batch over all ranks, as the model's loss takes them (``vitpar.models.loss``);
            those of `outputs` if the loss has a true `LOCAL_TARGETS`.
        """
        here = targets
        if not self.local_targets:
            rows = self._part.outputs.row_range(len(targets))
            here = targets[rows.start : rows.stop]
        if outputs.ndim < 3 and outputs.dtype is not torch.float64:
            # Not in 16 bits: the sum over classes and samples would lose precision. Logits of tokens are large: their
            # loss converts them in parts.
            outputs = outputs.float()
        part = () if self.vocabulary is None else (self.vocabulary,)
        with torch.no_grad():
            sums = self._loss.measure(outputs, here, *part)
            if sums is not None:
                self._measured = sums if self._measured is None else self._measured + sums
        mean = self._loss.total(outputs, here, *part) / self._count
        return mean * self.loss_scale if self._scales else mean

    def forward_backward(
        self, images: Tensor | None, targets: Tensor, keys: Tensor | None = None, **sides: Tensor
    ) -> Tensor:
        """Compute the gradients of one step: accumulated over micro-batches, reduced over data-parallel ranks.

        images: this rank's `image_rows` of the batch, [rows, …] as ``ModelConfig.input`` says: normalised images, or
            token ids; None where not `takes_images`.
        targets: those of all ranks, as in `loss`; those of this rank's `output_rows` if the loss has a true
            `LOCAL_TARGETS`.
        keys: int64 [batch], the random key of each sample for drop-path and dropout; None if the model has neither.
        sides: the model's other side inputs by name, [batch, …], on every rank (``ModelConfig.side_inputs``).

        Returns this rank's part of the loss (0-dim, detached, not scaled by `loss_scale`). Under every plan the sum
        over all ranks is the mean loss of the global batch (`global_loss`). Raises ModelError for a model with
        drop-path or dropout and no keys, and for missing side inputs.
        """
        images = self._as_input(images, sides)
        if self.config.stochastic and keys is None:
            raise ModelError(
                f"{self.config.name} has drop-path or dropout, whose random numbers depend on the samples: pass keys, "
                "int64 [batch], one per sample and epoch"
            )
        for stage in self.stages.values():
            if not stage.training:  # train() walks through every module, which costs host time
                stage.train()
        self._count, self._measured = self._loss.count(targets, self.batch_size), None
        with ExitStack() as exit_stack:
            with self.phase("forward" if self._schedule is None else "pipeline"):
                # With one rank and one micro-batch a gradient is exact in the type that backward computes in.
                adds = self.plan.world_size > 1 or self.batch.microbatches > 1 or self.config.holders
                keep = self.keep_low_precision_gradients and not adds
                exit_stack.enter_context(self.low_precision_params.in_place(keep))
            losses = self.run_microbatches(images, targets, keys if self.config.stochastic else None, **sides)
        with self.phase("waiting for gradients"):
            # All messages are on their way before the first is waited for.
            for total in self._gradient_sums:
                total.start()
            self._tensor_sums.start()
            for total in self._gradient_sums:
                total.wait()
            self._tensor_sums.wait()
            self._shared_sums.run()
        if not losses:
            return torch.zeros((), device=self.device)
        part = (torch.stack(losses).sum() if len(losses) > 1 else losses[0]).detach()
        part = part / self.loss_scale if self._scales else part
        # Ranks with the same outputs have the same loss: each counts for its share in the sum over ranks.
        return part / self._sample_replicas if self._sample_replicas > 1 else part

    def global_loss(self, part: Tensor) -> Tensor:
        """Return the mean loss of the global batch, float64 and 0-dim.

        part: return value of `forward_backward` on this rank. Collective; may wait for the device.
        """
        total = part.detach().double()
        all_reduce_(total)
        return total

    @property
    def measured(self) -> Tensor | None:
        """This rank's part of what the loss measured in the last step (``Loss.measure``), a sum over ranks; or None."""
        return self._measured if self._measured is None else self._measured / self._sample_replicas

    def drop_gradient_sums(self) -> None:
        """Leave gradients of layers without ``fully_shard`` unreduced from here on, to run single layers."""
        while self._gradient_sums:
            self._gradient_sums.pop().drop()
        self._shared_sums.drop()

    def run_microbatches(
        self, images: Tensor | None, targets: Tensor, keys: Tensor | None, **sides: Tensor
    ) -> list[Tensor]:
        """Run forward and backward of all micro-batches, and return their losses (none where not `gives_outputs`).

        Call it inside `low_precision_params.in_place()`. Gradients of layers without ``fully_shard`` may not be
        reduced yet, and partial ones are not summed.
        """
        losses: list[Tensor] = []
        if self._schedule is not None:
            args = (images,) if self.takes_images else ()
            kwargs: dict[str, Any] = sides if keys is None else {"keys": keys, **sides}
            if self.gives_outputs:
                kwargs |= {"target": targets, "losses": losses}
            with self.phase("pipeline"):
                self._schedule.step(*args, return_outputs=False, **kwargs)
        else:
            (stage,) = self.stages.values()
            assert images is not None, "without a pipeline every rank needs images"
            count = self.batch.microbatches
            parts = [x.chunk(count) if x is not None else (None,) * count for x in (images, targets, keys)]
            beside = [{name: side.chunk(count)[n] for name, side in sides.items()} for n in range(count)]
            for number, (part, target, key, others) in enumerate(zip(*parts, beside, strict=True), start=1):
                set_last_micro_batch(stage, number == count, self._kept)
                with self.phase("forward"):
                    loss = self.loss(stage(part, key, **others), target)
                with self.phase("backward"):
                    loss.backward()
                losses.append(loss)
        return losses

    @torch.no_grad()
    def predict(self, images: Tensor | None, batch: int, **sides: Tensor) -> Tensor | None:
        """Outputs of this rank's `output_rows` [rows, …] in evaluation mode, or None where not `gives_outputs`.

        Logits are those of this rank's part of the `vocabulary`, if it is split: `complete` gathers them.

        images: this rank's `image_rows` of the batch, or None where not `takes_images`. batch: images over all ranks,
        any multiple of `smallest_batch`. sides: as in `forward_backward`. Raises ModelError for missing ones.
        """
        images = self._as_input(images, sides)
        with self.low_precision_params.in_place():
            x = self._evaluation.run(images, batch, sides, self._given)
        # Only sends of earlier batches: the next batch may start while this one's are still under way.
        self._evaluation.wait(but=len(self.stages))
        return x if self.gives_outputs else None

    def complete(self, outputs: Tensor) -> Tensor:
        """Return outputs of `predict` with the logits of all ids. Collective over the ranks of `vocabulary`."""
        if self.vocabulary is None:
            return outputs
        return complete_logits(outputs, self.config.output_shape[-1], self.vocabulary)

    def _as_input(self, x: Tensor | None, sides: Mapping[str, Tensor]) -> Tensor | None:
        """Return the model's input in the precision of the model, unless it has a data type of its own.

        Raises ModelError if a side input is missing.
        """
        needed = {name for name, side in self.config.side_inputs.items() if not side.optional}
        if missing := needed - sides.keys():
            raise ModelError(
                f"{self.config.name} takes {', '.join(sorted(missing))} besides its input: pass each by its name, "
                "[batch, …] for all ranks"
            )
        return x if x is None or self.config.input.dtype is not None else x.to(self.precision.compute)

    @property
    def smallest_batch(self) -> int:
        """Number of images that every evaluation batch must be a multiple of, so that all layers split it evenly."""
        return smallest_microbatch(self.plan) * self.plan.data_parallel

    def parameters_changed(self) -> None:
        """Drop gathered and 16-bit copies. Call it after parameters were written by anything but the optimizer."""
        self._evaluation.wait()
        self.low_precision_params.forget()
        for stage in self.stages.values():
            free_gathered(stage)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters, sharded, with their names in the complete model."""
        for stage in self.stages.values():
            yield from stage.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield this rank's parameters, sharded, such as for an optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def __repr__(self) -> str:
        return f"ParallelModel({self.config.name}, {self.plan}, stages {list(self.stages)}, {self.device})"

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's parameters, detached, by their names in the complete model; sharded ones are DTensors.

        `vitpar.save_weights` writes complete parameters to a folder, `vitpar.load_weights` reads them under any plan.
        """
        return {name: parameter.detach() for name, parameter in self.named_parameters()}

    def replicas(self, tensor: Tensor) -> int:
        """Return the number of ranks in the world that hold the same part of this parameter or gradient."""
        shards = 1
        if isinstance(tensor, DTensor):
            for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
                shards *= size if not placement.is_replicate() else 1
        return dist.get_world_size() // self.plan.pipeline_degree // shards
