"""Make ``torch.cuda`` report a GPU that does not exist.

The patches are permanent, so use a separate process that starts with ``bench.simulated_gpu.library.load``.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, cast

import torch
from torch._subclasses import FakeTensorMode, fake_tensor

from bench.simulated_gpu.gpus import Gpu


def report(gpu: Gpu) -> None:
    """Let ``torch.cuda`` answer as on a machine with one `gpu`."""
    device = torch.device("cuda", 0)
    stream = torch.Stream(device=device)
    properties = gpu.properties
    cuda: Any = torch.cuda
    answers = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": properties,
        "get_device_capability": (properties.major, properties.minor),
        "get_device_name": properties.name,
        "current_stream": stream,
        "default_stream": stream,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
        "set_device": None,
        "set_stream": None,
        "synchronize": None,
        "_lazy_init": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    for name, answer in answers.items():
        setattr(cuda, name, lambda *_, answer=answer, **__: answer)
    cuda.device = cuda.stream = nullcontext  # a class with one argument, as theirs are
    # Fake tensor modes would create a tensor on the device to initialise it.
    cast(Any, FakeTensorMode).avoid_device_init = property(lambda self: True)
    cast(Any, fake_tensor).init_gpu_context = lambda device: None
