"""Cases of AdamW in one pass (tests/training/optim/test_one_pass.py), for `helpers.interpreted`."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from helpers.interpreted import run
from vitpar import Execution, model_config, parallelize, parse, validate
from vitpar.kernels.adamw import CHUNK, adamw_
from vitpar.launch import ALONE, join, leave
from vitpar.parallel import ParallelModel
from vitpar.recipe.sections.training import LossScaleSection, OptimizerSection
from vitpar.sharded import local
from vitpar.strategy.freezing import listed_parameters
from vitpar.training.optim import one_pass
from vitpar.training.optim.average import EMA
from vitpar.training.optim.loss_scale import LossScaler
from vitpar.training.optim.optimizer import ShardedOptimizer
from vitpar.training.step import TrainStep

SHAPES = ((5,), (CHUNK,), (33, 65), (2 * CHUNK + 4,), (1,))
"""Shapes with less than a chunk, full chunks, and full chunks with a remainder."""
LRS, DECAYS = (1e-3, 2e-3, 1e-3, 3e-3, 1e-3), (0.05, 0.0, 0.05, 0.3, 0.0)
BETAS, EPS, AVERAGE_DECAY = (0.9, 0.99), 1e-6, 0.97
WORST = 1e-6
"""Largest relative difference from float64 in three updates, of parameters of about 1: some units of float32."""


def drawn(seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random numbers of a standard normal distribution, at an address for vector instructions."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def kernel(
    gradients: torch.dtype,
    copies: torch.dtype | None,
    factor: float | None,
    averages: bool,
    at: int,
    device: str = "cpu",
) -> None:
    """Compare three passes over tensors of several shapes with AdamW's formulas in float64.

    at: elements before each gradient in its memory, which decide whether its address allows vector instructions.
    """
    ours = {name: [drawn(n, shape).to(device) for n, shape in enumerate(SHAPES)] for name in ("p", "average")}
    ours |= {name: [torch.zeros(shape, device=device) for shape in SHAPES] for name in ("m", "v")}
    wide = {name: [tensor.double() for tensor in tensors] for name, tensors in ours.items()}
    narrow = [torch.zeros(shape, dtype=copies, device=device) for shape in SHAPES] if copies else []
    average = ours["average"] if averages else []
    scale = None if factor is None else torch.tensor(factor, device=device)
    before = [tensor.clone() for tensor in ours["average"]]
    for step in (1, 2, 3):
        given = [
            drawn(10 * step + n, (at + torch.Size(s).numel(),), gradients).to(device)[at:].view(s)
            for n, s in enumerate(SHAPES)
        ]
        kept = [gradient.clone() for gradient in given]
        count = [float(step)] * len(SHAPES)
        settings = count, LRS, DECAYS, *BETAS, EPS, AVERAGE_DECAY
        adamw_(ours["p"], given, ours["m"], ours["v"], narrow, average, scale, *settings)
        assert all(map(torch.equal, given, kept)), "gradients are only read"
        for n, (lr, decay) in enumerate(zip(LRS, DECAYS, strict=True)):
            g, (beta1, beta2) = given[n].double() * (1 if factor is None else float(scale)), BETAS
            p, m, v, a = (wide[name][n] for name in ("p", "m", "v", "average"))
            p.mul_(1 - lr * decay)
            m.copy_(beta1 * m + (1 - beta1) * g)
            v.copy_(beta2 * v + (1 - beta2) * g**2)
            p.sub_(lr * (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + EPS))
            a.copy_(AVERAGE_DECAY * a + (1 - AVERAGE_DECAY) * p)
    for name in ("p", "m", "v", *(["average"] if averages else [])):
        for found, exact in zip(ours[name], wide[name], strict=True):
            torch.testing.assert_close(found.double(), exact, rtol=WORST, atol=WORST)
    assert averages or all(map(torch.equal, ours["average"], before))
    for copy, p in zip(narrow, ours["p"], strict=True) if narrow else ():
        assert torch.equal(copy, p.to(copy.dtype))


def torchs() -> None:
    """Compare with torch's AdamW over steps, groups and missing gradients; continue each with the other's state."""
    layers = [nn.ModuleDict({"fc": nn.Linear(70, 40), "norm": nn.LayerNorm(40)}) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    optimizers = [
        ShardedOptimizer(
            layer.named_parameters(),
            OptimizerSection(weight_decay=0.3, layer_decay=0.5, betas=(0.8, 0.9), implementation=name),
            layers_above=lambda name: int("norm" in name),
        )
        for layer, name in zip(layers, ("triton", "for-loop"), strict=True)
    ]
    assert [optimizer.one_pass for optimizer in optimizers] == [True, False]
    for step, lr in enumerate((0.1, 0.02, 0.3, 0.05)):
        for layer, optimizer in zip(layers, optimizers, strict=True):
            for n, (name, p) in enumerate(layer.named_parameters()):
                p.grad = None if step == 1 and name == "fc.bias" else drawn(10 * step + n, tuple(p.shape))
            optimizer.set_weight_decay(0.3 * step)
            optimizer.step(lr)
            assert all(p.grad is None for p in layer.parameters())
        states = [optimizer.state() for optimizer in optimizers]
        assert set(states[0]) == set(states[1]) and states[0]["step.fc.bias"] == states[1]["step.fc.bias"]
        for name, value in states[0].items():
            torch.testing.assert_close(value, states[1][name].to(value.dtype), rtol=1e-5, atol=1e-7, msg=name)
        for mine, theirs in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        if step == 2:  # continue each with the other's state, as a resumed run does
            held = [{name: value.clone() for name, value in state.items()} for state in states]
            for optimizer, other in zip(optimizers, reversed(held), strict=True):
                optimizer.forget()
                optimizer.allocate()
                for name, value in optimizer.state().items():
                    value.copy_(other[name])


CPU = torch.device("cpu")
SIZES = {"image_size": 8, "patch_size": 4, "embed_dim": 48, "depth": 1, "num_heads": 2}
CONFIG = model_config("vit_custom", **SIZES, num_classes=10, init="perturbed")


def trained(precision: str, implementation: str, limit: float, freeze: frozenset[str]) -> tuple[ParallelModel, EMA]:
    """Return a small ViT and its average after four steps with clipping."""
    plan = validate(parse("dp1"), CONFIG, 4)
    model = parallelize(CONFIG, plan, Execution(4, precision=precision, frozen=freeze), CPU)
    optimizer = ShardedOptimizer(model.named_parameters(), OptimizerSection(eps=1e-2, implementation=implementation))
    assert optimizer.one_pass == (implementation == "triton")
    scaler = LossScaler(LossScaleSection(initial_scale=96.0)) if precision == "fp16" else None
    ema = EMA(model, 0.9, warmup=True)
    seen: set[torch.dtype] = set()

    def look(number: int) -> None:
        """Note the data types of gradients."""
        seen.update(p.grad.dtype for p in model.parameters() if p.grad is not None)

    step = TrainStep(model, optimizer, clip_grad_norm=limit, scaler=scaler, ema=ema, after_gradients=look)
    generator = torch.Generator().manual_seed(0)
    for number in (1, 2, 3, 4):
        images = torch.randn(4, 3, 8, 8, generator=generator)
        step(number, 3e-3, images, torch.arange(4))
        if number == 2:
            copies = current_copies(model)
            assert bool(copies) == (implementation == "triton" and precision != "fp32")
            assert set(copies) <= {name for name, p in model.named_parameters() if p.requires_grad}
            reads = precision if implementation == "triton" else "fp32"
            assert seen == {{"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[reads]}
            for name, p in model.named_parameters():
                if name in copies:
                    assert torch.equal(copies[name], local(p.detach()).to(copies[name].dtype)), name
            with ema.averaged():  # the average replaces the parameters, and copies are made of it
                assert not current_copies(model)
                logits = model.predict(images, 4)
            after = model.predict(images, 4)
            assert logits is not None and after is not None and not torch.equal(logits, after)
    return model, ema


def current_copies(model: ParallelModel) -> dict[str, Tensor]:
    """Return the 16-bit copies that the optimizer wrote and that are still used, by the parameter's name."""
    found = {name: model.low_precision_params._written_copy(p) for name, p in model.named_parameters()}
    return {name: copy for name, copy in found.items() if copy is not None}


def steps(precision: str, limit: float, freeze: frozenset[str] = frozenset()) -> None:
    """Compare training steps in one pass with those of torch's fused AdamW."""
    (mine, average), (theirs, expected) = (
        trained(precision, implementation, limit, freeze) for implementation in ("triton", "fused")
    )
    # A copy that is rounded up instead of down changes losses, and gradients without effect on the loss.
    tolerance = {"fp32": 2e-6, "bf16": 2e-4, "fp16": 1e-4}[precision]
    others = dict(theirs.named_parameters())
    for name, p in mine.named_parameters():
        torch.testing.assert_close(p, others[name], rtol=0, atol=tolerance)
        pair = average.average[name], expected.average[name]
        torch.testing.assert_close(*pair, rtol=0, atol=tolerance)


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the name of each case and what it runs."""
    kinds = torch.float32, torch.bfloat16, torch.float16
    for (gradients, copies), averages in product(zip(kinds, (None, *kinds[1:]), strict=True), (False, True)):
        factor, at = (0.37, 1) if averages else (None, 0)
        yield f"kernel {gradients} {averages}", partial(kernel, gradients, copies, factor, averages, at)
    yield "torch", torchs
    yield "fp32", partial(steps, "fp32", 1.0)
    yield "bf16", partial(steps, "bf16", 1.0, listed_parameters("embed, *.norm1.*", CONFIG))
    yield "fp16", partial(steps, "fp16", 0.0)
    yield "fp16 clipped", partial(steps, "fp16", 1.0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    one_pass.DEVICES = ("cpu",)
    join(ALONE, "cpu")
    run(cases())
    leave()
