"""Results of a benchmark."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass

from vitpar.bench.kernels import Kernel
from vitpar.models.config import ViTConfig
from vitpar.strategy import Plan


@dataclass(frozen=True)
class Repeated:
    """A quantity, once for each repeat."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float:
        """The standard deviation over repeats, 0 of one."""
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0

    def to_json(self) -> dict[str, object]:
        return {"mean": self.mean, "deviation": self.deviation, "repeats": list(self.values)}


@dataclass(frozen=True)
class DataCost:
    """Cost of real input."""

    name: str
    synthetic: Repeated
    """Seconds of a step with synthetic input."""
    share: Repeated
    """Share of a step that synthetic input saves, in each repeat; below 0 if noise is larger than that."""


@dataclass(frozen=True)
class PhaseTime:
    """Seconds of a phase in a step: the mean of all ranks, so that phases add up to the step, and of the rank where it
    takes longest. limit: how long it would take at least (``vitpar.bench.limits``), the mean of all ranks; None where
    that is not known."""

    name: str
    seconds: Repeated
    slowest: float
    limit: float | None

    @property
    def limit_share(self) -> float | None:
        """How near it is to its limit: 1 is there."""
        return self.limit / self.seconds.mean if self.limit is not None and self.seconds.mean else None


@dataclass(frozen=True)
class WarmUp:
    """steps: not counted, of which the first took `first` seconds. steady: whether further steps were no faster."""

    steps: int
    first: float
    steady: bool


@dataclass(frozen=True)
class Rates:
    """Rates of one rank."""

    matmul: float
    """Measured FLOP/s of matrix products of the model's shapes."""
    peak: float | None
    """FLOP/s of the data sheet; None where that is not known."""
    bandwidth: float
    """Measured bytes per second of a copy."""


@dataclass(frozen=True)
class Benchmark:
    """Steps of a model under a plan; seconds are of one step.

    steps: in a repeat. data: None where input was synthetic. memory_bytes: at most, on the fullest rank, as the metrics
    of a training count them. phases: of further steps, which were timed phase by phase; `phased` is how long these
    took, `between` what of that is in no phase. kernels: None where nothing was recorded. attention: the kernel, None
    for torch's choice. warnings: what makes steps slower than they would be elsewhere.
    """

    config: ViTConfig
    plan: Plan
    batch_size: int
    precision: str
    compiled: bool
    attention: str | None
    device: str
    device_name: str
    steps: int
    warm_up: WarmUp
    seconds: Repeated
    data: DataCost | None
    memory_bytes: int
    rates: Rates
    phases: tuple[PhaseTime, ...]
    phased: Repeated
    kernels: tuple[Kernel, ...] | None = None
    warnings: tuple[str, ...] = ()

    @property
    def images_per_second(self) -> Repeated:
        """Images per second of all ranks together."""
        return Repeated(tuple(self.batch_size / seconds for seconds in self.seconds.values))

    @property
    def between(self) -> float:
        """Seconds of a step in no phase, the mean of all ranks."""
        return self.phased.mean - sum(phase.seconds.mean for phase in self.phases)

    @property
    def mfu(self) -> float | None:
        """The model's FLOPs over what the data sheet promises of all devices in that time."""
        return self._share(self.rates.peak) if self.rates.peak is not None else None

    @property
    def matmul_share(self) -> float:
        """The model's FLOPs over those of nothing but its products in that time, as measured: how near the step is to
        what is possible here."""
        return self._share(self.rates.matmul)

    def _share(self, rate: float) -> float:
        return self.config.flops * self.batch_size / self.seconds.mean / (rate * self.plan.world_size)

    def to_json(self) -> dict[str, object]:
        """All of it, times in seconds."""
        data = self.data
        return {
            "model": self.config.name,
            "plan": str(self.plan),
            "schedule": self.plan.schedule if self.plan.pipeline_degree > 1 else None,
            "microbatches": self.plan.microbatches,
            "ranks": self.plan.world_size,
            "batch_size": self.batch_size,
            "precision": self.precision,
            "compile": self.compiled,
            "attention": self.attention,
            "device": self.device,
            "device_name": self.device_name,
            "warm_up": asdict(self.warm_up),
            "steps": self.steps,
            "step_seconds": self.seconds.to_json(),
            "images_per_second": self.images_per_second.to_json(),
            "mfu": self.mfu,
            "matmul_share": self.matmul_share,
            "rates": asdict(self.rates),
            "memory_bytes": self.memory_bytes,
            "data": data
            and {
                "name": data.name,
                "synthetic_step_seconds": data.synthetic.to_json(),
                "share": data.share.to_json(),
            },
            "phased_step_seconds": self.phased.to_json(),
            "phases": [
                {
                    "name": phase.name,
                    "seconds": phase.seconds.to_json(),
                    "slowest_rank_seconds": phase.slowest,
                    "limit_seconds": phase.limit,
                    "limit_share": phase.limit_share,
                }
                for phase in self.phases
            ],
            "between_seconds": self.between,
            "kernels": self.kernels and [asdict(kernel) for kernel in self.kernels],
        }
