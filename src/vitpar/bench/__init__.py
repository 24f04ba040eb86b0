"""Benchmark of training steps as the trainer runs them: speed, memory, input, phases and their limits, kernels."""

from vitpar.bench.kernels import Kernel
from vitpar.bench.result import Benchmark, DataCost, PhaseTime, Repeated
from vitpar.bench.run import Settings, bench
from vitpar.parallel.phases import PhaseClock

__all__ = ["Benchmark", "DataCost", "Kernel", "PhaseClock", "PhaseTime", "Repeated", "Settings", "bench"]
