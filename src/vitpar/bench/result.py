"""Results of a benchmark."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass

from vitpar.bench.kernels import Kernel
from vitpar.models.config import ModelConfig
from vitpar.strategy import Plan


@dataclass(frozen=True)
class Repeated:
    """A measured quantity with one value per repeat."""

    values: tuple[float, ...]
    """Values in order of the repeats."""

    @property
    def mean(self) -> float:
        """Mean over repeats."""
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float:
        """Sample standard deviation over repeats; 0 for a single repeat."""
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0

    def to_json(self) -> dict[str, object]:
        return {"mean": self.mean, "deviation": self.deviation, "repeats": list(self.values)}


@dataclass(frozen=True)
class DataCost:
    """Cost of real input."""

    name: str
    """Name of the data set."""
    synthetic: Repeated
    """Seconds of a step with synthetic input."""
    share: Repeated
    """Share of the step time that synthetic input saves; negative if noise is larger than the saving."""
    prepared: float | None = None
    """Images that the CPUs of this machine prepare in a second; None if it is unknown."""


@dataclass(frozen=True)
class PhaseTime:
    """Time of one phase of a step."""

    name: str
    """Name of the phase."""
    seconds: Repeated
    """Seconds per step, the mean over ranks, so that phases add up to the step."""
    slowest: float
    """Seconds per step on the rank where the phase takes longest."""
    limit: float | None
    """Lower limit in seconds (``vitpar.bench.limits``), the mean over ranks; None if unknown."""

    @property
    def limit_share(self) -> float | None:
        """Limit over measured time, 1 at the limit; None if the limit is unknown."""
        return self.limit / self.seconds.mean if self.limit is not None and self.seconds.mean else None


@dataclass(frozen=True)
class WarmUp:
    """Steps before the measurement."""

    steps: int
    """Number of warm-up steps."""
    first: float
    """Seconds of the first one."""
    steady: bool
    """Whether the step time had stopped falling at the end."""


@dataclass(frozen=True)
class Rates:
    """Rates of one rank."""

    matmul: float
    """Measured FLOP/s of matrix products of the model's shapes."""
    peak: float | None
    """FLOP/s of the data sheet; None if unknown."""
    bandwidth: float
    """Measured bytes per second of a copy."""


@dataclass(frozen=True)
class Benchmark:
    """Measured steps of a model under a plan."""

    config: ModelConfig
    plan: Plan
    batch_size: int
    """Images of a step over all ranks."""
    precision: str
    compiled: bool
    """Whether blocks are compiled."""
    attention: str | None
    """Attention kernel; None for torch's choice."""
    device: str
    """Device type, such as "cuda"."""
    device_name: str
    """Name of the GPU or CPU."""
    steps: int
    """Steps in a repeat."""
    warm_up: WarmUp
    seconds: Repeated
    """Seconds of a step on the slowest rank."""
    data: DataCost | None
    """Cost of real input; None if the input was synthetic."""
    memory_bytes: int
    """Peak bytes on the rank that needs most, counted as in the metrics of a training."""
    rates: Rates
    phases: tuple[PhaseTime, ...]
    """Phases of additional steps, which were timed phase by phase."""
    phased: Repeated
    """Seconds of these additional steps, the mean over ranks."""
    kernels: tuple[Kernel, ...] | None = None
    """Kernels, longest first; None if no trace was recorded."""
    warnings: tuple[str, ...] = ()
    """Reasons why steps are slower here than elsewhere."""

    @property
    def images_per_second(self) -> Repeated:
        """Images per second of all ranks together."""
        return Repeated(tuple(self.batch_size / seconds for seconds in self.seconds.values))

    @property
    def between(self) -> float:
        """Seconds of a step outside all phases, the mean over ranks."""
        return self.phased.mean - sum(phase.seconds.mean for phase in self.phases)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization relative to the data sheet of all devices; None if the peak is unknown."""
        return self._share(self.rates.peak) if self.rates.peak is not None else None

    @property
    def matmul_share(self) -> float:
        """Model FLOPs utilization relative to the measured rate of the model's matrix products."""
        return self._share(self.rates.matmul)

    def _share(self, rate: float) -> float:
        return self.config.flops * self.batch_size / self.seconds.mean / (rate * self.plan.world_size)

    def to_json(self) -> dict[str, object]:
        """Return all results as JSON, times in seconds."""
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
                "images_per_second_prepared": data.prepared,
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
