"""Let torch's compiler and Triton generate code for a GPU that does not exist.

The patches are permanent, as in ``bench.simulated_gpu.torch_cuda``. Call `prepare` before anything imports
``torch._dynamo``, whose device interface keeps the functions that it finds in ``torch.cuda``.
"""

from __future__ import annotations

import os
import sys
from typing import Any, cast

import torch

from bench.simulated_gpu.gpus import Gpu
from bench.simulated_gpu.torch_cuda import report

TOOLKIT = "13.0"
"""Version of CUDA that torch's build for these GPUs has."""


def prepare(gpu: Gpu, cache: str) -> None:
    """Let ``torch.compile`` generate kernels for `gpu`.

    cache: folder for what the compilers write. A new one for each process, so that nothing is taken from a cache.
    """
    assert "torch._dynamo" not in sys.modules, "the compiler was imported before the GPU was simulated"
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": os.path.join(cache, "triton")}
    for name in ("_cuda_getDeviceCount", "_cuda_getCurrentRawStream", "_cuda_getDevice", "_cuda_exchangeDevice"):
        if not hasattr(torch._C, name):  # as in the CPU build
            setattr(torch._C, name, lambda *_: 0)
    report(gpu)
    cast(Any, torch.version).cuda = TOOLKIT
    import torch._inductor.config as settings
    from triton.runtime import driver

    driver.set_active(cast(Any, _Driver(gpu)))
    import torch._inductor.runtime.triton_helpers as helpers

    cast(Any, helpers).set_driver_to_gpu = lambda: None
    settings.compile_threads = 1  # a worker process would not have these patches
    settings.fx_graph_cache = False
    settings.use_static_triton_launcher = False  # would load the kernel into the driver
    settings.profile_bandwidth = True  # kernels note the bytes that they move
    import torch._functorch.config as autograd

    autograd.enable_autograd_cache = False
    autograd.force_non_lazy_backward_lowering = True


class _Driver:
    """Triton's driver of the GPU: it names the target, and cannot launch."""

    def __init__(self, gpu: Gpu) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", 10 * gpu.major, 32)
        self.utils = self

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        return torch.cuda
