"""The proof that a plan does not change the training: the plan against one process, on the same seed and data.

Compared are the loss, every parameter's gradient, and the losses and parameters of a few SGD steps (SGD, because Adam
and clipping hide a wrong gradient scale). Every rank compares its own shards, so a replica that differs is found too.
Rank 0 alone runs the one-process model; its values are broadcast parameter by parameter.
"""

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitpar.launch.world_group import all_reduce_, broadcast_
from vitpar.models.config import ViTConfig
from vitpar.models.initial import initialise
from vitpar.models.vit import ViT
from vitpar.parallel import Communication, ParallelModel, parallelize
from vitpar.parallel.float8 import compute_in_float8
from vitpar.strategy import Plan
from vitpar.train.gradient_norm import multiply_
from vitpar.train.optimizer import ShardedOptimizer, local
from vitpar.train.recipe import Implementation, OptimizerSection

STEPS = 3
LEARNING_RATE = 0.05
FLOOR = 1e-3
LOSS_SCALE = 1024.0  # of fp16, on both sides: a power of two, so that it rounds nothing
TOLERANCES = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 0.15, "fp16": 0.1, "fp8": 0.3}
"""Largest relative error allowed, by precision.

bfloat16 keeps 8 bits, and single elements of a gradient are sums that cancel: 7 % is seen in sound plans. float16 keeps
11 bits: 1.4 % is seen, and 6 % in the biases of qk_norm, whose gradient is nothing but what rounding leaves of it.
float8 keeps 4 bits: 17 % is seen. What a plan does wrong by less than that shows in fp32 only.
"""


@dataclass(frozen=True)
class Comparison:
    """One quantity under the plan against one process.

    magnitude: the largest absolute value in it. error: the largest absolute difference over the magnitude, or over
    a floor where that is more: FLOOR, in bfloat16 half its eps (4e-3), times the magnitude of the model's largest
    tensor. A gradient that is zero but for rounding, such as that of a key's bias, has no relative error.
    """

    name: str
    error: float
    magnitude: float


@dataclass(frozen=True)
class CheckResult:
    """What `check_plan` found. gradients: of the first step, one a parameter. parameters: after the last step."""

    plan: str
    model: str
    precision: str
    batch_size: int
    tolerance: float
    losses: tuple[float, ...]
    reference_losses: tuple[float, ...]
    gradients: tuple[Comparison, ...]
    parameters: tuple[Comparison, ...]

    @property
    def worst(self) -> Comparison:
        """The quantity with the largest error, losses among them."""
        pairs = enumerate(zip(self.losses, self.reference_losses, strict=True), start=1)
        losses = [Comparison(f"loss of step {i}", abs(a - b) / abs(b), abs(b)) for i, (a, b) in pairs]
        everything = [*self.gradients, *self.parameters, *losses]
        return max(everything, key=lambda c: c.error if c.error == c.error else float("inf"))

    @property
    def passed(self) -> bool:
        """Whether every error is within the tolerance (a NaN is not)."""
        return self.worst.error <= self.tolerance

    def to_json(self) -> dict[str, Any]:
        """Everything, for ``vitpar check --json``."""
        return {**asdict(self), "worst": asdict(self.worst), "passed": self.passed}


def check_plan(
    config: ViTConfig,
    plan: Plan,
    *,
    batch_size: int,
    device: torch.device,
    precision: str = "fp32",
    reduce_dtype: str | None = None,
    tolerance: float | None = None,
    seed: int = 0,
    label_smoothing: float = 0.0,
    compile_blocks: bool = False,
    activation_memory_budget: float | None = None,
    communication: Communication = Communication(),
    optimizer: Implementation = "auto",
    steps: int = STEPS,
) -> CheckResult:
    """Compare `plan` with one process over some SGD steps. Collective over the plan's ranks; equal results on every
    rank.

    Every sample of the batch is another random image, so that a micro-batch or a slice taken twice shows.
    """
    model = parallelize(
        config,
        plan,
        batch_size=batch_size,
        device=device,
        precision_name=precision,
        reduce_dtype=reduce_dtype,
        seed=seed,
        label_smoothing=label_smoothing,
        compile_blocks=compile_blocks,
        activation_memory_budget=activation_memory_budget,
        communication=communication,
    )
    images, labels, keys = _samples(config, steps, batch_size, seed)
    reference = None
    if dist.get_rank() == 0:
        reference = _one_process(model, images, labels, keys, seed)

    if model.precision.scales_loss:
        model.loss_scale = LOSS_SCALE
    rows = model.image_rows(batch_size)
    settings = OptimizerSection(name="sgd", lr=LEARNING_RATE, weight_decay=0, implementation=optimizer)
    updates = ShardedOptimizer(model.named_parameters(), settings)
    losses: list[float] = []
    gradients: tuple[Comparison, ...] = ()
    for step in range(steps):
        x = images[step][rows].to(device=device, dtype=model.precision.compute) if model.takes_images else None
        part = model.forward_backward(x, labels[step].to(device), keys[step].to(device))
        losses.append(_over_samples(part, model))
        if model.precision.scales_loss:
            multiply_(updates.gradients(), 1 / LOSS_SCALE)
        if step == 0:
            gradients = _compare(
                model,
                {name: p.grad for name, p in model.named_parameters()},
                reference.gradients if reference else None,
            )
        updates.step(LEARNING_RATE)
    parameters = _compare(model, dict(model.named_parameters()), reference.parameters if reference else None)
    expected = torch.tensor(reference.losses if reference else [0.0] * steps, dtype=torch.float64, device=device)
    broadcast_(expected)
    limit = TOLERANCES[precision] if tolerance is None else tolerance
    shown = (str(plan), config.name, precision, batch_size, limit)
    return CheckResult(*shown, tuple(losses), tuple(expected.tolist()), gradients, parameters)


@dataclass(frozen=True)
class _Reference:
    """What one process computes: the loss of each step, the first gradients and the last parameters by name."""

    losses: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def _samples(config: ViTConfig, steps: int, batch_size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random images [steps, batch, channels, size, size], labels and keys [steps, batch]: the same on every rank."""
    g = torch.Generator().manual_seed(seed)
    images = torch.randn(steps, batch_size, config.channels, config.image_size, config.image_size, generator=g)
    labels = torch.randint(0, config.num_classes, (steps, batch_size), generator=g)
    return images, labels, torch.randint(0, 2**62, (steps, batch_size), generator=g)


def _one_process(parallel: ParallelModel, images: Tensor, labels: Tensor, keys: Tensor, seed: int) -> _Reference:
    """The same steps by the plain model: no mesh, no wrappers, one batch. Only settings are taken from `parallel`."""
    config, numbers, device = parallel.config, parallel.precision, parallel.device
    scale = LOSS_SCALE if numbers.scales_loss else 1.0
    model = ViT(config).to(device=device, dtype=numbers.parameters)
    if numbers.float8:
        for block in model.blocks.values():
            compute_in_float8(block)
    initialise(model, seed, config)
    losses, gradients = [], {}
    for step in range(len(images)):
        inputs = (images[step].to(device, numbers.compute), keys[step].to(device) if config.stochastic else None)
        computed = {name: p.to(numbers.compute) for name, p in model.named_parameters()}
        with sdpa_kernel(SDPBackend.MATH) if device.type == "cuda" else nullcontext():  # not what is to be checked
            logits = functional_call(model, computed, inputs).to(numbers.parameters)
        loss = F.cross_entropy(logits, labels[step].to(device), label_smoothing=parallel.label_smoothing)
        model.zero_grad()
        (loss * scale).backward()
        losses.append(loss.item())
        with torch.no_grad():
            for name, p in model.named_parameters():
                assert p.grad is not None, f"{name} has no gradient in one process"
                p.grad /= scale
                if step == 0:
                    gradients[name] = p.grad.clone()
                p -= LEARNING_RATE * p.grad
    return _Reference(losses, gradients, {name: p.detach() for name, p in model.named_parameters()})


def _over_samples(part: Tensor, model: ParallelModel) -> float:
    """The loss of the global batch from each rank's part."""
    total = part.double() / model.sample_replicas
    all_reduce_(total)
    return total.item()


def _compare(
    model: ParallelModel, mine: dict[str, Tensor | None], reference: dict[str, Tensor] | None
) -> tuple[Comparison, ...]:
    """Every tensor of the whole model, by name, against `reference` (on rank 0): the largest error over all ranks'
    shards.

    mine: this rank's sharded tensors; None in place of a tensor that should be there counts as an infinite error.
    """
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in ViT(model.config).named_parameters()}
    errors, magnitudes = [], []
    for name, shape in shapes.items():
        whole = torch.empty(shape, dtype=torch.float64, device=model.device)
        if reference is not None:
            whole.copy_(reference[name])
        broadcast_(whole)
        magnitudes.append(whole.abs().max())
        errors.append(_largest_difference(mine[name], whole) if name in mine else torch.zeros_like(magnitudes[-1]))
    error, magnitude = torch.stack(errors).nan_to_num(nan=torch.inf), torch.stack(magnitudes)
    all_reduce_(error, dist.ReduceOp.MAX)
    floor = max(FLOOR, torch.finfo(model.precision.compute).eps / 2)
    relative = error / magnitude.clamp(min=floor * magnitude.max().item())
    rows = zip(shapes, relative.tolist(), magnitude.tolist(), strict=True)
    return tuple(Comparison(*row) for row in rows)


def _largest_difference(tensor: Tensor | None, whole: Tensor) -> Tensor:
    """max |tensor - its part of whole| over this rank's shard, 0-dim float64."""
    if tensor is None:
        return torch.full((), torch.inf, dtype=torch.float64, device=whole.device)
    if isinstance(tensor, DTensor):
        # src_data_rank=None: every rank has the whole value, so each cuts its own part and nothing is sent.
        whole = local(distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None))
    mine = local(tensor.detach()).to(whole.device)  # offloaded ones are on the host
    difference = (mine.double() - whole).abs()
    return difference.max() if difference.numel() else difference.new_zeros(())
