"""Measure the rates of one GPU that a training step of a ViT rests on, at the shapes of B/16, L/16, H/14 and g/14.

    python experiments/gpu_micro.py --json micro.json             # a minute on an H100
    python experiments/gpu_micro.py --tiny --device cpu           # a rehearsal

| row       | measures                                                                                             |
|-----------|------------------------------------------------------------------------------------------------------|
| copy      | bytes/s that a copy reads and writes                                                                 |
| product   | each matrix product of a block: forward, gradients of input and weight, forward onto the residual    |
| epilogue  | product with tanh-GELU by cuBLASLt, compared with a kernel of its own                                |
| fp8       | forward in float8: scales a row with fast and exact sums, one scale a tensor                         |
| attention | forward and backward of each kernel of torch, and whether two backwards are equal bit by bit         |
| adamw     | vitpar's update in one pass                                                                          |
| sustained | a product for seconds: its rate at the clock that training runs at, and in a burst                   |

What does not run is a row with its error. The JSON file is written after every row. gpu_refit.py makes rates of the
planner from it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.gpu_models import MODELS, batch_for
from bench.harness import Report, parser
from bench.one_gpu import SUSTAINED_S, bandwidth, block_layers, seconds_of
from vitpar.models import ViTConfig, model_config
from vitpar.models.compiled import attend_packed

LEAST_S = 0.08
"""Seconds that a row is measured for, at least."""
FP8_WIDTH = 1280
"""Smallest embed_dim that float8 is measured for."""
KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
BYTES_OF_ADAMW = 30
"""Bytes a parameter of one pass: float32 parameter and moments, gradient and copy in bf16."""


class Rows:
    """Measurements so far, printed and written one by one."""

    def __init__(self, device: torch.device, report: Report) -> None:
        self.device, self._report = device, report
        self._all: list[dict[str, Any]] = []

    def add(self, what: str, measure: Callable[[], dict[str, Any]], **facts: Any) -> None:
        """Measure a row; an error becomes part of it, so that the others are still measured."""
        try:
            row = {"what": what, **facts, **measure()}
        except Exception as error:
            row = {"what": what, **facts, "error": f"{type(error).__name__}: {str(error)[:200]}"}
        self._all.append(row)
        print(", ".join(f"{key} {_shown(value)}" for key, value in row.items()), flush=True)
        self._report.keep("rows", self._all)

    def seconds(self, run: Callable[[], object], least: float = LEAST_S) -> float:
        """Return the mean seconds of a call."""
        return seconds_of(run, self.device, least)


def main() -> None:
    """Read the options and measure."""
    made = parser(__doc__)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--tiny", action="store_true", help="a tiny model: only to see the program run")
    options = made.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        made.error("no CUDA device can be seen: run on a machine with a GPU, or rehearse with --tiny --device cpu")
    device = torch.device(options.device)
    torch.manual_seed(0)
    if options.tiny:
        models = [(model_config("vit_tiny_patch16_224", depth=2, image_size=32), 4)]
    else:
        free = torch.cuda.mem_get_info()[0]
        models = [(model_config(name), batch_for(name, free)) for name in MODELS]
    rows = Rows(device, Report(options.json))
    rows.add("copy", lambda: {"bytes_per_second": bandwidth(device, 16 if options.tiny else 1024)})
    for config, batch in models:
        products(rows, config, batch)
    attention(rows, models)
    rows.add("adamw", partial(adamw, rows, 2 if options.tiny else 100))
    rows.add("sustained", partial(sustained, rows, *(models[0] if options.tiny else models[1])))


def products(rows: Rows, config: ViTConfig, batch: int) -> None:
    """Measure the products of a block, in bf16 and float8."""
    tokens = batch * config.tokens
    for layer, (inner, outer) in block_layers(config).items():
        x, weight, y = (_draw(rows, *shape) for shape in ((tokens, inner), (outer, inner), (tokens, outer)))
        bias, flops = _draw(rows, outer), 2 * tokens * inner * outer
        runs: dict[str, Callable[[], Tensor]] = {
            "forward": lambda x=x, w=weight, b=bias: torch.addmm(b, x, w.t()),
            "input": lambda y=y, w=weight: torch.mm(y, w),
            "weight": lambda x=x, y=y: torch.mm(y.t(), x),
        }
        if layer == "fc2":
            runs["forward_onto_residual"] = lambda x=x, y=y, w=weight: y.addmm_(x, w.t(), beta=0.5)
        facts = {"model": config.name, "batch_size": batch, "layer": layer, "flops": flops}
        widest = max(tensor.nbytes for tensor in (x, weight, y))
        for kind, run in runs.items():
            rows.add("product", lambda run=run: {"seconds": rows.seconds(run)}, kind=kind, widest=widest, **facts)
        if layer == "fc1":
            rows.add("epilogue", partial(_epilogue, rows, bias, x, weight), **facts)
        if config.embed_dim >= FP8_WIDTH or rows.device.type == "cpu":
            _float8(rows, x, weight, bias, facts)


def _epilogue(rows: Rows, bias: Tensor, x: Tensor, weight: Tensor) -> dict[str, Any]:
    plain = rows.seconds(lambda: F.gelu(torch.addmm(bias, x, weight.t()), approximate="tanh"))
    fused = rows.seconds(lambda: torch._addmm_activation(bias, x, weight.t(), use_gelu=True))
    return {"seconds": fused, "plain_seconds": plain}


def _float8(rows: Rows, x: Tensor, weight: Tensor, bias: Tensor, facts: dict[str, Any]) -> None:
    """Measure a forward in float8 with scales of 1. Its inputs are converted before."""
    a, b = (tensor.to(torch.float8_e4m3fn) for tensor in (x, weight))
    by_row = (torch.ones(len(a), 1, device=a.device), torch.ones(1, len(b), device=a.device))
    whole = (torch.ones((), device=a.device),) * 2
    for scaling, scales, fast in (("row", by_row, True), ("row", by_row, False), ("tensor", whole, True)):

        def run(scales: tuple[Tensor, Tensor] = scales, fast: bool = fast) -> Tensor:
            return torch._scaled_mm(a, b.t(), *scales, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=fast)

        rows.add("fp8", lambda run=run: {"seconds": rows.seconds(run)}, scaling=scaling, fast=fast, **facts)


def attention(rows: Rows, models: list[tuple[ViTConfig, int]]) -> None:
    """Measure every kernel at the models' shapes; for 257 tokens also at 256, a multiple of every tile."""
    shapes = [
        (batch, config.num_heads, config.tokens, config.embed_dim // config.num_heads) for config, batch in models
    ]
    shapes += [(batch, heads, 256, features) for batch, heads, tokens, features in shapes if tokens == 257]
    for shape, name in itertools.product(shapes, (*KERNELS, "packed")):
        rows.add("attention", partial(_attention, rows, shape, name), shape=list(shape), kernel=name)


def _attention(rows: Rows, shape: tuple[int, int, int, int], kernel: str) -> dict[str, Any]:
    """Measure forward and backward of a kernel. The backward of packed gives one packed gradient, of others three."""
    batch, heads, tokens, features = shape
    qkv = _draw(rows, batch, tokens, heads * 3 * features).requires_grad_()
    q, k, v = (part.transpose(1, 2) for part in qkv.unflatten(-1, (heads, 3 * features)).split(features, -1))
    packed = kernel == "packed"

    def forward() -> Tensor:
        return attend_packed(qkv, None, features) if packed else F.scaled_dot_product_attention(q, k, v)

    with nullcontext() if packed else sdpa_kernel(KERNELS[kernel]):
        y = forward()
        gradient = torch.randn_like(y)

        def backward() -> tuple[Tensor, ...]:
            return torch.autograd.grad(y, qkv if packed else (q, k, v), gradient, retain_graph=True)

        forward_s = rows.seconds(lambda: forward().detach())
        backward_s = rows.seconds(backward)
        repeatable = all(itertools.starmap(torch.equal, zip(backward(), backward(), strict=True)))
    flops = 4 * batch * heads * tokens**2 * features
    return {"flops": flops, "forward": forward_s, "backward": backward_s, "repeatable": repeatable}


def adamw(rows: Rows, tensors: int) -> dict[str, Any]:
    """Measure the update of `tensors` tensors of 3 Mi elements."""
    from vitpar.kernels.adamw import adamw_

    def drawn(dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [_draw(rows, 3 * 2**20).to(dtype) for _ in range(tensors)]

    p, g, m, v, copies = drawn(), drawn(torch.bfloat16), drawn(), [x.abs() for x in drawn()], drawn(torch.bfloat16)
    factor = torch.tensor(0.5, device=rows.device)
    rates = ([2.0] * tensors, [1e-4] * tensors, [0.05] * tensors)
    seconds = rows.seconds(lambda: adamw_(p, g, m, v, copies, [], factor, *rates, 0.9, 0.999, 1e-8, 0.0))
    return {"seconds": seconds, "bytes_per_second": BYTES_OF_ADAMW * tensors * 3 * 2**20 / seconds}


def sustained(rows: Rows, config: ViTConfig, batch: int) -> dict[str, Any]:
    """Measure one product in a burst and for seconds."""
    inner, outer = block_layers(config)["fc1"]
    x, weight = _draw(rows, batch * config.tokens, inner), _draw(rows, outer, inner)
    burst = rows.seconds(lambda: torch.mm(x, weight.t()))
    long = rows.seconds(lambda: torch.mm(x, weight.t()), SUSTAINED_S if rows.device.type == "cuda" else LEAST_S)
    return {"flops": 2 * len(x) * inner * outer, "burst": burst, "seconds": long}


def _draw(rows: Rows, *shape: int) -> Tensor:
    """Return random numbers in bf16: products of zeros run at a higher clock."""
    return torch.randn(*shape, device=rows.device, dtype=torch.bfloat16)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
