"""Measures steps of training as the trainer runs them: speed, memory, what input costs, phases beside their limits, and
the kernels they are made of."""

from vitpar.bench.kernels import Kernel
from vitpar.bench.result import Benchmark, DataCost, PhaseTime, Repeated
from vitpar.bench.run import Settings, bench
from vitpar.parallel.phases import PhaseClock

__all__ = ["Benchmark", "DataCost", "Kernel", "PhaseClock", "PhaseTime", "Repeated", "Settings", "bench"]
