"""Measurement of a `ModelProfile` on one device.

Every layer runs as the first rank of a plan would run it, in a fake process group: messages are packed and unpacked,
but not sent. So one device is enough for the shapes of every strategy of the runtime. Memory is measured at two small
numbers of rows and extrapolated linearly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from vitpar.launch.resources import cpu_cores, keep_freed_memory
from vitpar.models.config import ModelConfig
from vitpar.models.derived import Excerpt
from vitpar.models.families import config_to_json
from vitpar.models.layers import given_sides, zero_sides
from vitpar.models.loss import CrossEntropy, Loss
from vitpar.parallel import Execution, ParallelModel, parallelize
from vitpar.parallel.attention import AttentionChoice, choose_attention
from vitpar.parallel.precision import resolve_precision
from vitpar.planner.measure.clock import Clock, Progress
from vitpar.planner.measure.device import date_and_versions, device_name, live_bytes
from vitpar.planner.profile.curves import Curve, Timing
from vitpar.planner.profile.estimate import tensors
from vitpar.planner.profile.profiles import (
    CHECKPOINTS,
    Bytes,
    LayerKind,
    LayerProfile,
    ModelProfile,
    WeightProfile,
    always_wrapped,
)
from vitpar.sharded import local
from vitpar.strategy import output_layout, parse, token_layout, validate
from vitpar.strategy.execution import FP8_MIN_FEATURES, FastAccum
from vitpar.strategy.layout import image_layout, row_parts
from vitpar.strategy.validate import unsplittable
from vitpar.tasks.mae import MAE
from vitpar.tasks.mlm import MaskedLanguage
from vitpar.training.optim.norms import clip_factor, global_norm
from vitpar.training.optim.one_pass import choose_implementation
from vitpar.training.optim.optimizer import ShardedOptimizer
from vitpar.training.recipe.sections import OptimizerSection

CHOSEN_FOR = 64
"""Images of the micro-batch for which the attention kernel is chosen."""
LONGEST = {"cpu": 0.25, "cuda": 0.1}  # seconds of forward and backward: no point that would take longer is measured
MOST_ROWS = 512
"""Largest number of rows to measure, in units of `LayerBench.unit`."""


@dataclass(frozen=True)
class Subject:
    """The model to profile."""

    config: ModelConfig
    """Shape of the model."""
    precision: str
    """Name of the precision, as in ``vitpar.parallel.precision``."""
    ranks: int
    """Largest number of ranks of a stage, up to which tensor-parallel modes are measured."""
    compile_blocks: bool = False
    """Whether blocks are compiled."""
    attention: str = "auto"
    """Attention kernel, as in recipes."""
    fp8_min_features: int = FP8_MIN_FEATURES
    """Smallest linear layers that multiply in float8, as in recipes."""
    fp8_fast_accum: FastAccum = "forward"
    """Float8 products that accumulate in fewer bits, as in recipes."""

    def execution(self, batch_size: int) -> Execution:
        """Return the settings of a step."""
        return Execution(
            batch_size,
            self.precision,
            compile=self.compile_blocks,
            fp8_min_features=self.fp8_min_features,
            fp8_fast_accum=self.fp8_fast_accum,
        )

    def strategies(self) -> Iterator[tuple[str, str, bool]]:
        """Yield (tensor, checkpoint, wrapped) of all layer profiles to measure, as `LayerProfile` names them."""
        for tensor in tensors(self.config, self.ranks):
            wrappings = (True,) if always_wrapped(tensor) else (False, True)
            for checkpoint in CHECKPOINTS:
                if not (checkpoint == "selective" and self.compile_blocks):
                    yield from ((tensor, checkpoint, wrapped) for wrapped in wrappings)

    def choose_attention(self, device: torch.device) -> AttentionChoice:
        """Choose the attention kernel for this process as a run on one rank with `CHOSEN_FOR` images would.

        Raises RecipeError.
        """
        plan = validate(parse("dp1"), self.config, CHOSEN_FOR)
        with pretended(1):
            return choose_attention(
                self.attention, self.config, plan, CHOSEN_FOR, resolve_precision(self.precision), device
            )


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
    subject: Subject, mesh: str, device: torch.device, blocks: tuple[str, ...] | None = None
) -> Iterator[ParallelModel]:
    """Yield the first rank's part of a model, in a fake process group.

    mesh: the strategy as a string, without a pipeline.
    blocks: names of the blocks that it has; None for one of each kind that the strategy can split.
    """
    if blocks is None:
        strategy = parse(mesh).strategy
        blocks = tuple(layer.name for layer in subject.config.block_kinds if not unsplittable(layer, strategy))
    config = Excerpt(subject.config, blocks)
    smallest = row_parts(parse(mesh).strategy)
    plan = validate(parse(mesh), config, smallest)
    with pretended(plan.world_size):
        yield parallelize(config, plan, subject.execution(smallest), device, _loss(subject.config))


def _loss(config: ModelConfig) -> Loss:
    """Return a loss for the outputs of a model: logits of tokens, pixels of patches, or logits of classes."""
    if config.input.dtype is not None:
        return MaskedLanguage()
    return MAE() if config.FAMILY in MAE.FAMILIES else CrossEntropy()


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
        first = taken is None
        self._x = _input(shape, config, dtype, device) if first else torch.randn(shape, dtype=dtype, device=device)
        # The group computes samples of which each rank may have a part.
        group = slice(len(output_layout(self._strategy)[0].row_range(total)))
        sides = zero_sides(config, group.stop, self._model.device)
        self._sides = given_sides(self.layer, None, sides, slice(here), group)
        self._targets = _targets(self._model, total, group.stop)
        self._gradient: Tensor | None = None  # of the output; the head ends in the loss, which needs none

    def forward(self) -> None:
        """Run a forward; one backward must follow each."""
        x = self._x.detach().requires_grad_(not self.layer.description.first)
        if self.layer.description.last:
            y = self._model.loss(self.layer(x), self._targets)
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
            saved, most = live.now, live.most
            live.restart()
            self.backward()
        return saved, max(most, live.most) - saved


def profile_model(
    subject: Subject,
    device: torch.device,
    clock: Clock,
    processes: int = 1,
    progress: Progress = lambda done, total, words: None,
) -> ModelProfile:
    """Measure a model. Collective over the processes of `clock`; equal for all.

    clock: timer, with the processes that measure at the same time.
    processes: how many these are.
    progress: called before each strategy.

    Must not be called inside a process group, because it creates fake ones.
    """
    assert not dist.is_initialized(), "a process group is initialized already"
    if device.type == "cpu":
        keep_freed_memory()  # as ranks do
    attention = subject.choose_attention(device)
    strategies = list(subject.strategies())
    layers: list[LayerProfile] = []
    weights = []
    for number, (tensor, checkpoint, wrapped) in enumerate(strategies):
        progress(number, len(strategies) + 1, f"{tensor}{CHECKPOINTS[checkpoint]}{' wrapped' * wrapped}")
        mesh = f"{'fsdp2x' * wrapped}{tensor}{CHECKPOINTS[checkpoint]}"
        with built(subject, mesh, device) as model, model.low_precision_params.in_place():
            for kind in model.config.kinds:
                bench = LayerBench(model, kind)
                # The same strategy without fully_shard was measured just before, where it exists.
                plain = next((p for p in layers[-len(model.config.kinds) :] if p.layer == kind), None)
                if wrapped and not always_wrapped(tensor) and plain:
                    layers.append(_wrapped(bench, clock, plain))
                else:
                    layers.append(_layer(bench, clock, tensor, checkpoint, wrapped))
                if wrapped and checkpoint == "none":
                    weights.append(_weights(bench, clock, tensor))
    progress(len(strategies), len(strategies) + 1, "optimizer")
    optimizer = Curve(timings=tuple(_optimizer(subject, blocks, device, clock) for blocks in (1, 3)))
    profile = ModelProfile(
        model=config_to_json(subject.config),
        device=device.type,
        device_name=device_name(device),
        precision=subject.precision,
        fp8_min_features=subject.fp8_min_features,
        compiled=subject.compile_blocks,
        processes=processes,
        threads=torch.get_num_threads(),
        cores=cpu_cores() if device.type == "cpu" else processes,
        layers=tuple(layers),
        weights=tuple(weights),
        optimizer=optimizer,
        microbatch=_microbatch(subject, device, clock),
        pace=clock.pace,
        measured={**date_and_versions(), "attention": attention.backend or "torch's choice"},
    )
    return profile.at_pace(clock.usual)


def _layer(bench: LayerBench, clock: Clock, tensor: str, checkpoint: str, wrapped: bool) -> LayerProfile:
    """Measure a layer at rising numbers of rows, until the next would take too long."""
    forward, backward, rows = [], [], bench.unit
    while rows <= MOST_ROWS * bench.unit:
        bench.prepare(rows)
        both = clock.timings(rows, bench.forward, bench.backward)
        forward.append(both[0])
        backward.append(both[1])
        taken = sum(timing.seconds for timing in both)
        # A GPU's time has a bend where it no longer waits for the host: points are closer there.
        larger = (2,) if clock.device.type == "cuda" else (4, 2)
        more = next((times for times in larger if times * taken < LONGEST[clock.device.type]), None)
        if more is None:
            break
        rows *= more
    share = 0.0
    if bench.layer.description.takes and checkpoint == "none":
        bench.prepare(forward[0].size)
        alone = clock.timings(1, bench.forward, bench.backward_to_input)[1].seconds
        share = min(1.0, alone / backward[0].seconds)
    (saved, space), (saved_2, space_2) = bench.memory(bench.unit), bench.memory(2 * bench.unit)
    return LayerProfile(
        layer=bench.kind,
        tensor=tensor,
        checkpoint=checkpoint,
        wrapped=wrapped,
        forward=Curve(timings=tuple(forward)),
        backward=Curve(timings=tuple(backward)),
        input_share=share,
        saved=_line(bench.unit, saved, saved_2),
        workspace=_line(bench.unit, space, space_2),
    )


def _wrapped(bench: LayerBench, clock: Clock, plain: LayerProfile) -> LayerProfile:
    """Return the profile of the layer under ``fully_shard``.

    It is that of the plain layer plus the hooks' time, measured once: it is the same for any number of rows.
    """
    first = plain.forward.timings[0], plain.backward.timings[0]
    bench.prepare(first[0].size)
    both = clock.timings(first[0].size, bench.forward, bench.backward)
    curves = []
    for curve, before, after in zip((plain.forward, plain.backward), first, both, strict=True):
        more = max(0.0, after.seconds - before.seconds)
        timings = (timing.model_copy(update={"seconds": timing.seconds + more}) for timing in curve.timings)
        curves.append(Curve(timings=tuple(timings)))
    return plain.model_copy(update={"wrapped": True, "forward": curves[0], "backward": curves[1]})


def _line(unit: int, once: int, twice: int) -> Bytes:
    """Return the line through the bytes for `unit` rows (`once`) and for 2 * `unit` rows (`twice`)."""
    return Bytes(fixed=max(0, 2 * once - twice), per_row=max(0, twice - once) / unit)


def _weights(bench: LayerBench, clock: Clock, tensor: str) -> WeightProfile:
    """Measure the time to gather parameters and to reduce gradients, apart from communication, which is fake."""
    layer = bench.layer
    assert isinstance(layer, FSDPModule) and isinstance(layer, nn.Module)

    def gather() -> None:
        layer.reshard()
        layer.unshard()

    layer.unshard()
    elements = sum(local(p).numel() for p in layer.parameters())
    bench.prepare(bench.unit)
    taken = {}
    for sync in (False, True):
        bench.syncing(sync)
        taken[sync] = clock.timings(elements, bench.forward, bench.backward)[1].seconds
    bench.syncing(False)
    bench.forward()
    bench.backward()
    return WeightProfile(
        layer=bench.kind,
        tensor=tensor,
        elements=elements,
        gather=clock.timing(elements, gather),
        reduce=max(0.0, taken[True] - taken[False]),
    )


def _optimizer(subject: Subject, blocks: int, device: torch.device, clock: Clock) -> Timing:
    """Time the work done once per step: 16-bit copies, the norm of the gradients, AdamW.

    blocks: number of copies of each kind of block, which sets the number of elements.
    """
    names = tuple(layer.name for layer in subject.config.block_kinds) * blocks
    with built(replace(subject, compile_blocks=False), "dp1", device, names) as model:
        implementation = choose_implementation(OptimizerSection(), subject.precision, device).name
        updates = ShardedOptimizer(model.named_parameters(), OptimizerSection(), implementation=implementation)
        parameters = [parameter for _, parameter in model.named_parameters()]

        def fill() -> None:
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)

        def step() -> None:
            with model.low_precision_params.in_place():
                pass
            norm = global_norm(updates.gradients(), model)
            if updates.one_pass:
                updates.step_in_one_pass(1e-3, clip_factor(norm, 1.0), model.low_precision_params, None)
            else:
                updates.step(1e-3)

        # A few blocks take the host longer than the GPU, but in a training step the host is ahead by then.
        return clock.timings(sum(p.numel() for p in parameters), fill, step, ahead=True)[1]


def _targets(model: ParallelModel, batch: int, here: int) -> Tensor:
    """Return targets of zeros for `batch` samples over all ranks, of which this rank gives the outputs of `here`."""
    shape, dtype = model.config.output_shape, model.precision.compute
    if model.local_targets:
        return torch.zeros(here, *shape, dtype=dtype, device=model.device)
    return torch.zeros(batch, *shape[:-1], dtype=torch.int64, device=model.device)


def _input(shape: tuple[int, ...], config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an input of the model: random images, or token ids of 0."""
    if config.input.dtype is None:
        return torch.randn(shape, dtype=dtype, device=device)
    return torch.zeros(shape, dtype=getattr(torch, config.input.dtype), device=device)


def _microbatch(subject: Subject, device: torch.device, clock: Clock) -> float:
    """Return the seconds of a micro-batch of one image beyond those of its layers."""
    config, layers = subject.config, 0.0
    (begin, *blocks, end) = config.layer_names
    first = config.layers[blocks[0]]
    # Where the first block fits between embed and head it is the only one, so that little is subtracted.
    fits = first.gives == config.layers[end].takes
    names = tuple(blocks[:1] if fits else blocks)
    counts = Counter(config.layers[name].kind for name in (begin, *names, end))
    with built(subject, "dp1", device, names) as model, model.low_precision_params.in_place():
        sides = zero_sides(config, 1, device)
        for kind, times in counts.items():
            bench = LayerBench(model, kind)
            bench.prepare(1)
            layers += times * sum(timing.seconds for timing in clock.timings(1, bench.forward, bench.backward))
    with built(subject, "dp1", device, names) as model, model.low_precision_params.in_place():
        images = _input((1, *config.input.shape), config, model.precision.compute, device)
        keys, targets = sides.pop("keys", None), _targets(model, 1, 1)
        whole = clock.timing(1, lambda: model.run_microbatches(images, targets, keys, **sides)).seconds
    return max(0.0, whole - layers)
