"""Compares tensors of a plan with those of one process, each against the rounding noise of that process.

A sum over ranks adds up in another order than a sum in one process, so results differ in their last bits. How much that
makes in a gradient depends on the tensor: a gradient that is the small difference of large numbers may have no correct
digit, another has seven. So one process runs again, on parameters and images that are changed in their last bit, and a
tensor may differ under the plan by a few times as much as it did there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from vitpar.launch.world_group import all_reduce_, broadcast_
from vitpar.parallel import ParallelModel
from vitpar.sharded import local

FACTOR = 10.0
"""How many times its noise a tensor may differ. Sound plans reach 7.6, in float16 with tensor parallelism, which also
rounds partial sums that one process does not have; 2.6 was the most in fp32 and bf16."""
TRIMMED = 20
"""Share of updates, one in this many elements, that is left out: those that differ most.

Adam's first step moves an element by the learning rate in the direction of its gradient's sign. Where the gradient is
only rounding noise, so is the sign.
"""
LEAST = {"fp64": (1e-9, 1e-9), "fp32": (1e-4, 1e-4), "bf16": (0.02, 5e-3), "fp16": (5e-3, 1e-3), "fp8": (0.1, 0.02)}
"""Tolerances that are always allowed, by precision: (`largest` and `l2`, `scale`)."""
IMAGES = 1e-6
"""The least allowed where images are normalised and mixed, which is done in float32 in any precision."""
_METRICS = ("largest", "l2", "scale")


@dataclass(frozen=True)
class Comparison:
    """One tensor, or number, under the plan against one process.

    name: what is compared, such as ``gradient blocks.0.attn.qkv.weight``. metric: which of its differences comes
    nearest to what is allowed: `largest`, the largest difference of an element relative to the largest element; `l2`,
    the norm of the difference relative to the norm; `scale`, by how much the factor that fits it best to the tensor of
    one process differs from 1. error: that difference. allowed: the most that it may be. resolution: the least of what
    is allowed of the three: an error of the whole tensor by so much would have been seen. magnitude: the largest
    absolute value in one process.
    """

    name: str
    metric: str
    error: float
    allowed: float
    resolution: float
    magnitude: float

    @property
    def severity(self) -> float:
        """The error in units of what is allowed: above 1 it is too large. NaN counts as infinite."""
        ratio = self.error / self.allowed
        return ratio if ratio == ratio else float("inf")


Noise = Mapping[str, Sequence[float]]
"""By kind of tensor the differences `largest`, `l2` and `scale` that rounding makes in one process."""


def kind(name: str) -> str:
    """The name of a parameter without the number of its block: tensors of one kind share their noise."""
    return re.sub(r"\.\d+\.", ".*.", name)


def noise_of(
    wholes: Mapping[str, Tensor],
    others: Sequence[Mapping[str, Tensor]],
    trimmed: bool = False,
    changed: Mapping[str, Tensor] | None = None,
) -> Noise:
    """Return the differences between `wholes` and each of `others`, runs with noise: root mean squares over each kind.

    trimmed: see `compare`. changed: the parameters whose changes these are: a change is known no better than the
    parameter is stored.
    """
    found: dict[str, list[Tensor]] = {}
    for other in others:
        for name, whole in wholes.items():
            expected = whole.double()
            sums = _sums(other[name].double() - expected, expected, 1, trimmed)
            metrics = _metrics(sums[None], _sizes(expected)[None])[0]
            if changed is not None:
                eps = torch.finfo(changed[name].dtype).eps / 2
                metrics = metrics.clamp(min=eps * (changed[name].abs().max() / expected.abs().max()).item())
            found.setdefault(kind(name), []).append(metrics)
    return {name: torch.stack(metrics).square().mean(0).sqrt().tolist() for name, metrics in found.items()}


def compare(
    what: str,
    model: ParallelModel,
    mine: Mapping[str, Tensor | None],
    shapes: Mapping[str, torch.Size],
    wholes: Mapping[str, Tensor] | None,
    noise: Noise,
    *,
    least: tuple[float, float],
    tolerance: float | None,
    trimmed: bool = False,
) -> list[Comparison]:
    """Compare every tensor of the whole model. Collective; equal results on all ranks.

    what: the quantity, for names. mine: this rank's sharded tensors by parameter name; None for one that should be
    there counts as an infinite error. shapes: of all parameters of the whole model. wholes: the values in one process,
    on rank 0 alone. noise: equal on all ranks. least: what is always allowed, as in `LEAST`. tolerance: what is allowed
    instead of a multiple of the noise. trimmed: whether to leave out the elements that differ most (`TRIMMED`).
    """
    sums, sizes = [], []
    for name, shape in shapes.items():
        whole = torch.empty(shape, dtype=torch.float64, device=model.device)
        if wholes is not None:
            whole.copy_(wholes[name])
        broadcast_(whole)  # every rank compares its own shards, so a replica that differs is found too
        sizes.append(_sizes(whole))
        sums.append(
            _own_sums(model, mine[name], whole, trimmed) if name in mine else torch.zeros_like(sizes[-1][[0] * 3])
        )
    found = torch.stack(sums)
    largest, added = found[:, 0].contiguous(), found[:, 1:].contiguous()
    all_reduce_(largest, dist.ReduceOp.MAX)
    all_reduce_(added)
    metrics = _metrics(torch.cat([largest[:, None], added], 1), torch.stack(sizes)).tolist()
    magnitudes = torch.stack(sizes)[:, 0].tolist()
    return [
        _nearest(f"{what} {name}", errors, noise[kind(name)], magnitude, least, tolerance)
        for name, errors, magnitude in zip(shapes, metrics, magnitudes, strict=True)
    ]


def compare_numbers(
    mine: Mapping[str, float],
    expected: Mapping[str, float],
    others: Sequence[Mapping[str, float]],
    *,
    least: float,
    tolerance: float | None,
) -> list[Comparison]:
    """Compare losses and norms with those of one process and of its runs with noise. All are equal on all ranks."""
    found = []
    for name, right in expected.items():
        noise = max(abs(other[name] - right) / abs(right) for other in others)
        error = abs(mine[name] - right) / abs(right)
        allowed = tolerance or max(least, FACTOR * noise)
        found.append(Comparison(name, "largest", error, allowed, allowed, abs(right)))
    return found


def _nearest(
    name: str,
    errors: Sequence[float],
    noise: Sequence[float],
    size: float,
    least: tuple[float, float],
    tolerance: float | None,
) -> Comparison:
    """The comparison of the metric that comes nearest to what is allowed."""
    elements, scale = least
    known = (elements, elements, scale)
    limits = [max(bound, FACTOR * measured) for bound, measured in zip(known, noise, strict=True)]
    allowed = limits if tolerance is None else [tolerance] * len(limits)
    found = [Comparison(name, *row, min(allowed), size) for row in zip(_METRICS, errors, allowed, strict=True)]
    return max(found, key=lambda comparison: comparison.severity)


def _sizes(whole: Tensor) -> Tensor:
    """The largest absolute value and the sum of squares, float64 [2]."""
    return torch.stack([whole.abs().max(), whole.square().sum()])


def _sums(difference: Tensor, expected: Tensor, replicas: int, trimmed: bool) -> Tensor:
    """Return the sums that metrics are computed from, float64 [3]: largest difference, sum of squares, product with the
    expected values.

    The last two are divided by the number of ranks that add the same values.
    """
    difference, expected = difference.flatten(), expected.flatten()
    if not len(difference):
        return difference.new_zeros(3)
    if trimmed:
        worst = difference.abs().topk(-(-len(difference) // TRIMMED)).indices
        difference = difference.index_fill(0, worst, 0.0)
    sums = difference.square().sum(), difference @ expected
    largest = sums[0] * 0 if trimmed else difference.abs().max()
    return torch.stack([largest, *(one / replicas for one in sums)])


def _metrics(sums: Tensor, sizes: Tensor) -> Tensor:
    """`largest`, `l2` and `scale` of tensors, [tensors, 3]. sums: [tensors, 3] of `_sums`. sizes: [tensors, 2]."""
    largest, squares, products = sums.unbind(1)
    greatest, whole = sizes.clamp(min=torch.finfo(torch.float64).tiny).unbind(1)
    errors = torch.stack([largest / greatest, (squares / whole).sqrt(), (products / whole).abs()], 1)
    return errors.nan_to_num(nan=torch.inf)


def _own_sums(model: ParallelModel, tensor: Tensor | None, whole: Tensor, trimmed: bool) -> Tensor:
    """`_sums` of this rank's shard."""
    if tensor is None:
        return torch.full((3,), torch.inf, dtype=torch.float64, device=whole.device)
    replicas = model.replicas(tensor)
    if isinstance(tensor, DTensor):
        # src_data_rank=None: every rank has the whole value, so each cuts its own part and nothing is sent.
        whole = local(distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None))
    mine = local(tensor.detach()).to(whole.device)  # offloaded ones are on the host
    return _sums(mine.double() - whole, whole, replicas, trimmed)


@dataclass(frozen=True)
class CheckResult:
    """The comparison of a plan with one process.

    precision, batch_size: of the steps. comparisons: losses and norms of gradients; then for every parameter its
    gradient in the first step, its change by the SGD steps, and the changes of it and of its average by the recipe's
    steps. unchecked: what of a training was not compared.
    """

    plan: str
    model: str
    precision: str
    batch_size: int
    comparisons: tuple[Comparison, ...]
    unchecked: str

    @property
    def worst(self) -> Comparison:
        """The comparison whose error is largest in units of what is allowed."""
        return max(self.comparisons, key=lambda comparison: comparison.severity)

    @property
    def passed(self) -> bool:
        """Whether every error is within what is allowed (a NaN is not)."""
        return self.worst.severity <= 1

    @property
    def quantities(self) -> dict[str, list[Comparison]]:
        """The comparisons of tensors by quantity (`gradient`, `SGD update`, `update`, `average`), the worst first, and
        those of numbers under `number`."""
        found: dict[str, list[Comparison]] = {}
        for comparison in self.comparisons:
            quantity, _, parameter = comparison.name.rpartition(" ")
            found.setdefault(quantity if "." in parameter else "number", []).append(comparison)
        return {name: sorted(group, key=lambda c: -c.severity) for name, group in found.items()}

    def to_json(self) -> dict[str, object]:
        """Everything, for ``vitpar check --json``."""
        return {**asdict(self), "worst": asdict(self.worst), "passed": self.passed}
