"""Benchmark of training steps as the trainer runs them: speed, memory, input, phases and their limits, kernels."""

from vitpar.bench.run import Settings, bench

__all__ = ["Settings", "bench"]
