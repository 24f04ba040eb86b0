"""GPUs that can be simulated: what torch and Triton read from the driver. Imports no torch.

Rates are in the data sheets of ``vitpar.clusters``.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace


@dataclass(frozen=True)
class Gpu:
    """Properties of a GPU, by the names of ``torch.cuda.get_device_properties``."""

    name: str
    """Name that the driver reports."""
    major: int
    """First digit of the compute capability."""
    multi_processor_count: int
    """Streaming multiprocessors."""
    total_memory: int
    """Bytes of memory."""
    shared_memory_per_block_optin: int
    """Most bytes of shared memory that a block of threads can have."""
    L2_cache_size: int
    """Bytes of L2 cache."""
    attention: str
    """Attention kernel that is assumed: the first of ``vitpar.parallel.attention.CANDIDATES`` that runs there."""

    @property
    def properties(self) -> SimpleNamespace:
        """Properties as torch returns them, with those that all of these GPUs share."""
        return SimpleNamespace(
            name=self.name,
            major=self.major,
            minor=0,
            multi_processor_count=self.multi_processor_count,
            total_memory=self.total_memory,
            warp_size=32,
            max_threads_per_multi_processor=2048,
            max_threads_per_block=1024,
            regs_per_multiprocessor=65536,
            shared_memory_per_block=48 * 2**10,
            shared_memory_per_block_optin=self.shared_memory_per_block_optin,
            shared_memory_per_multiprocessor=self.shared_memory_per_block_optin + 2**10,
            L2_cache_size=self.L2_cache_size,
            gcnArchName="",
            is_integrated=0,
        )


GPUS = {
    "H200": Gpu("NVIDIA H200", 9, 132, 150 * 10**9, 227 * 2**10, 60 * 2**20, "cudnn"),
    "H100": Gpu("NVIDIA H100 80GB HBM3", 9, 132, 85 * 10**9, 227 * 2**10, 50 * 2**20, "cudnn"),
    "A100": Gpu("NVIDIA A100-SXM4-80GB", 8, 108, 85 * 10**9, 163 * 2**10, 40 * 2**20, "flash"),
}
"""GPUs by name, which is that of the data sheet too."""
