"""Compile a block of a model for a simulated GPU, as the trainer compiles it, and record its kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

from bench.dry.record import Recording
from bench.dry.resources import packed_attention, resources
from bench.dry.work import BlockWork
from bench.simulated_gpu.gpus import Gpu
from vitpar.models import ViTConfig
from vitpar.models.compiled import use_packed_attention
from vitpar.parallel.linear import compute_in_float8
from vitpar.parallel.precision import PRECISIONS, LowPrecisionParams
from vitpar.strategy.execution import FP8_MIN_FEATURES

DROPPED = 0.1
"""Rate of the variants drop_path and dropout. It does not change the kernels."""


def block_work(
    config: ViTConfig, batch_size: int, gpu: Gpu, variant: str = "plain", *, cubins: bool = True
) -> BlockWork:
    """Return the work of the second block of `config` in bf16 or fp8, compiled for `gpu`.

    cubins: whether to compile the Triton kernels, for their registers and memory.
    """
    torch.compiler.reset()
    config = of_variant(config, variant)
    precision = PRECISIONS["fp8" if variant == "fp8" else "bf16"]
    shape = (batch_size, config.tokens, config.embed_dim)
    recording = Recording()
    _use_attention(gpu.attention)
    with FakeTensorMode():
        with torch.device("cuda", 0):
            name = config.layer_names[2]
            block: Any = config.build_layer(name)
            if precision.float8:
                compute_in_float8(name, block, FP8_MIN_FEATURES)
            x = torch.empty(shape, dtype=precision.compute, requires_grad=True)
            keys = torch.empty(batch_size, dtype=torch.int64) if config.stochastic else None
        use_packed_attention(variant == "packed")
        with LowPrecisionParams([block], precision.compute).in_place():
            recording.of(torch.compile(block.forward), x, keys, kept=x.shape)
    graphs = sorted(recording.graphs, key=lambda graph: graph.backward)
    assert [graph.backward for graph in graphs] == [False, True], f"{len(graphs)} graphs instead of one a direction"
    found = {name: resources(kernel.autotuner) for name, kernel in recording.kernels.items()} if cubins else {}
    if cubins and variant == "packed":
        found |= packed_attention(config.head_dim, gpu)
    return BlockWork((graphs[0], graphs[1]), x.numel() * x.element_size(), found)


def of_variant(config: ViTConfig, variant: str) -> ViTConfig:
    """Return `config` with drop-path or dropout in the variant of that name only."""
    return replace(config, **{name: DROPPED * (name == variant) for name in ("drop_path", "dropout")})


def _use_attention(kernel: str) -> None:
    """Let ``scaled_dot_product_attention`` call a kernel by name: torch chooses it in code that a CPU build lacks."""
    aten = torch.ops.aten

    def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)[0]

    def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return aten._scaled_dot_product_flash_attention(q, k, v)[0]

    F.scaled_dot_product_attention = {"cudnn": cudnn, "flash": flash}[kernel]
