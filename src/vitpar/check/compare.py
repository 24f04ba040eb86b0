"""Comparison of tensors under a plan with those of one process, relative to the rounding noise of that process.

Ranks add up in another order than one process, so results differ in their last bits. The effect on a gradient depends
on the tensor: the small difference of large numbers may have no correct digit, another gradient has seven. So one
process runs again, with parameters and images changed in their last bit. Under the plan a tensor may differ by a few
times the difference that this caused.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from vitpar.launch.world_group import all_reduce_, broadcast_
from vitpar.parallel import ParallelModel
from vitpar.sharded import local

FACTOR = 10.0
"""Allowed difference of a tensor, in multiples of its noise.

Correct plans reach 7.6 in float16 with tensor parallelism, which also rounds partial sums that one process does not
have. The most in fp32 and bf16 was 2.6.
"""
TRIMMED = 20
"""In updates, one in this many elements is left out: those that differ most.

Adam's first step moves each element by the learning rate in the direction of the gradient's sign. If a gradient is only
rounding noise, so is its sign.
"""
LEAST = {"fp64": (1e-9, 1e-9), "fp32": (1e-4, 1e-4), "bf16": (0.02, 5e-3), "fp16": (5e-3, 1e-3), "fp8": (0.1, 0.02)}
"""Lower bounds of the allowed differences, by precision: (for `largest` and `l2`, for `scale`)."""
IMAGES = 1e-6
"""Lower bound where images are normalised and mixed, which is done in float32 in any precision."""
_METRICS = ("largest", "l2", "scale")
TOGETHER = 1 << 23
"""Most elements of a message with several tensors: 64 MiB."""


@dataclass(frozen=True)
class Comparison:
    """One tensor or number under the plan, compared with one process.

    A tensor has three differences: `largest`, the largest difference of an element relative to the largest element;
    `l2`, the norm of the difference relative to the norm; `scale`, the distance from 1 of the factor that best fits one
    process's tensor to the plan's.
    """

    name: str
    """Quantity and parameter, such as ``gradient blocks.0.attn.qkv.weight``."""
    metric: str
    """The difference that is largest relative to its allowed value: `largest`, `l2` or `scale`."""
    error: float
    """Value of that difference."""
    allowed: float
    """Largest allowed value of that difference."""
    resolution: float
    """Smallest allowed value of the three: a relative error of the complete tensor above it would have been found."""
    magnitude: float
    """Largest absolute value in one process."""

    @property
    def severity(self) -> float:
        """The error relative to the allowed one; above 1 it is too large. NaN counts as infinite."""
        ratio = self.error / self.allowed
        return ratio if ratio == ratio else float("inf")


Noise = Mapping[str, Sequence[float]]
"""Differences (`largest`, `l2`, `scale`) that rounding causes in one process, by kind of tensor."""


def kind(name: str) -> str:
    """Return the name of a parameter without its block number; tensors of one kind share their noise."""
    return re.sub(r"\.\d+\.", ".*.", name)


def noise_of(
    wholes: Mapping[str, Tensor],
    others: Sequence[Mapping[str, Tensor]],
    trimmed: bool = False,
    changed: Mapping[str, Tensor] | None = None,
) -> Noise:
    """Return the noise: differences between `wholes` and each of `others`, as root mean squares over each kind.

    wholes: complete tensors of one process without noise. others: the same of runs with noise.
    changed: parameters, if the tensors are their changes. A change is at least as uncertain as the rounding of the
        stored parameter.
    """
    by_kind: dict[str, list[Tensor]] = {}
    for other in others:
        for name, whole in wholes.items():
            expected = whole.double()
            sums = _sums(other[name].double() - expected, expected, 1, trimmed)
            metrics = _metrics(sums[None], _sizes(expected)[None])[0]
            if changed is not None:
                eps = torch.finfo(changed[name].dtype).eps / 2
                metrics = metrics.clamp(min=eps * (changed[name].abs().max() / expected.abs().max()).item())
            by_kind.setdefault(kind(name), []).append(metrics)
    return {name: torch.stack(metrics).square().mean(0).sqrt().tolist() for name, metrics in by_kind.items()}


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
    """Compare every tensor of the complete model. Collective; equal results on all ranks.

    mine: this rank's sharded tensors by parameter name. A missing tensor (None) counts as an infinite error.
    wholes: tensors of one process, on rank 0; None on other ranks.
    noise: as `noise_of` returns it, equal on all ranks.
    least: lower bounds of the allowed differences, as in `LEAST`.
    tolerance: allowed difference, instead of a multiple of the noise.
    trimmed: whether to leave out the elements that differ most (`TRIMMED`).
    """
    sums, sizes = [], []
    for name, whole in _everywhere(shapes, wholes, model.device):  # so that a replica that differs is found too
        sizes.append(_sizes(whole))
        sums.append(whole.new_zeros(3))
        if name not in mine:
            continue
        tensor = mine[name]
        if tensor is None:
            sums[-1].fill_(torch.inf)
            continue
        if isinstance(tensor, DTensor):
            # src_data_rank=None: every rank has the whole value, so each cuts its own part and nothing is sent.
            whole = local(distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None))
        here = local(tensor.detach()).to(whole.device)  # offloaded parameters are in host memory
        sums[-1] = _sums(here.double() - whole, whole, model.replicas(tensor), trimmed)
    stacked = torch.stack(sums)
    largest, added = stacked[:, 0].contiguous(), stacked[:, 1:].contiguous()
    all_reduce_(largest, dist.ReduceOp.MAX)
    all_reduce_(added)
    metrics = _metrics(torch.cat([largest[:, None], added], 1), torch.stack(sizes)).tolist()
    magnitudes = torch.stack(sizes)[:, 0].tolist()
    return [
        _nearest(f"{what} {name}", errors, noise[kind(name)], magnitude, least, tolerance)
        for name, errors, magnitude in zip(shapes, metrics, magnitudes, strict=True)
    ]


def _everywhere(
    shapes: Mapping[str, torch.Size], wholes: Mapping[str, Tensor] | None, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that rank 0 has, float64, on all ranks. Collective; many tensors share a message."""
    names = list(shapes)
    while names:
        ends = list(accumulate(shapes[name].numel() for name in names))
        number = max(1, bisect_right(ends, TOGETHER))
        message = torch.empty(ends[number - 1], dtype=torch.float64, device=device)
        parts = message.tensor_split(ends[: number - 1])
        sent = {name: part.view(shapes[name]) for name, part in zip(names[:number], parts, strict=True)}
        if wholes is not None:
            for name, part in sent.items():
                part.copy_(wholes[name])
        broadcast_(message)
        yield from sent.items()
        names = names[number:]


def compare_numbers(
    mine: Mapping[str, float],
    expected: Mapping[str, float],
    others: Sequence[Mapping[str, float]],
    *,
    least: float,
    tolerance: float | None,
) -> list[Comparison]:
    """Compare losses and norms, equal on all ranks, with those of one process and of its runs with noise, `others`."""
    comparisons = []
    for name, right in expected.items():
        size = abs(right) or 1.0  # of exactly 0 the absolute error counts
        noise = max(abs(other[name] - right) / size for other in others)
        error = abs(mine[name] - right) / size
        allowed = max(least, FACTOR * noise) if tolerance is None else tolerance
        comparisons.append(Comparison(name, "largest", error, allowed, allowed, abs(right)))
    return comparisons


def _nearest(
    name: str,
    errors: Sequence[float],
    noise: Sequence[float],
    size: float,
    least: tuple[float, float],
    tolerance: float | None,
) -> Comparison:
    """Return the comparison of the metric that is largest relative to its allowed value."""
    elements, scale = least
    known = (elements, elements, scale)
    limits = [max(bound, FACTOR * measured) for bound, measured in zip(known, noise, strict=True)]
    allowed = limits if tolerance is None else [tolerance] * len(limits)
    comparisons = [Comparison(name, *row, min(allowed), size) for row in zip(_METRICS, errors, allowed, strict=True)]
    return max(comparisons, key=lambda comparison: comparison.severity)


def _sizes(whole: Tensor) -> Tensor:
    """Return the largest absolute value and the sum of squares, float64 [2]."""
    return torch.stack([whole.abs().max(), whole.square().sum()])


def _sums(difference: Tensor, expected: Tensor, replicas: int, trimmed: bool) -> Tensor:
    """Return the parts of the metrics, float64 [3]: maximum, sum of squares, and dot product with `expected`.

    They are those of `difference`. The last two are divided by `replicas`, the number of ranks that add the same values
    in the all-reduce.
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
    """Return `largest`, `l2` and `scale` of tensors, [tensors, 3].

    sums: [tensors, 3], as from `_sums`, over all ranks.
    sizes: [tensors, 2], as from `_sizes`.
    """
    largest, squares, products = sums.unbind(1)
    greatest, whole = sizes.clamp(min=torch.finfo(torch.float64).tiny).unbind(1)
    errors = torch.stack([largest / greatest, (squares / whole).sqrt(), (products / whole).abs()], 1)
    return errors.nan_to_num(nan=torch.inf)


@dataclass(frozen=True)
class CheckResult:
    """Result of the comparison of a plan with one process."""

    plan: str
    """Strategy string of the plan."""
    model: str
    """Name of the model."""
    precision: str
    """Precision of the steps."""
    batch_size: int
    """Images of a step over all ranks."""
    comparisons: tuple[Comparison, ...]
    """Losses and gradient norms; then, for every parameter, its gradient in the first step, its change by the SGD
    steps, and the changes of it and of its average by the recipe's steps."""
    unchecked: str
    """Parts of a training that were not compared."""

    @property
    def worst(self) -> Comparison:
        """The comparison whose error is largest relative to the allowed one."""
        return max(self.comparisons, key=lambda comparison: comparison.severity)

    @property
    def passed(self) -> bool:
        """Whether every error is within the allowed one. A NaN is not."""
        return self.worst.severity <= 1

    @property
    def quantities(self) -> dict[str, list[Comparison]]:
        """Comparisons by quantity, worst first.

        Quantities: `gradient`, `SGD update`, `update` and `average` for tensors, `number` for losses and norms.
        """
        groups: dict[str, list[Comparison]] = {}
        for comparison in self.comparisons:
            quantity, _, parameter = comparison.name.rpartition(" ")
            groups.setdefault(quantity if "." in parameter else "number", []).append(comparison)
        return {name: sorted(group, key=lambda c: -c.severity) for name, group in groups.items()}

    def to_json(self) -> dict[str, object]:
        """Return all results, for ``vitpar check --json``."""
        return {**asdict(self), "worst": asdict(self.worst), "passed": self.passed}
