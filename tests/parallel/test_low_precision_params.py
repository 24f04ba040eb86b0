"""Float32 parameters computed in 16 bits without ``fully_shard``."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from vitpar import model_config, parse, validate
from vitpar.launch import ALONE, join, leave
from vitpar.parallel import Execution, ParallelModel, parallelize
from vitpar.parallel.precision import LowPrecisionParams

CONFIG = model_config("vit_nano_patch4_16", num_classes=10, depth=4, init="perturbed")


@pytest.fixture
def device() -> Iterator[torch.device]:
    yield join(ALONE, "cpu")
    leave()


def built(device: torch.device, mesh: str = "dp1", precision: str = "bf16", **plan: Any) -> ParallelModel:
    whole = validate(replace(parse(mesh), **plan), CONFIG, 8)
    return parallelize(CONFIG, whole, Execution(8, precision=precision), device)


def batch(model: ParallelModel) -> tuple[torch.Tensor | None, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    images = torch.randn(8, 3, 16, 16, generator=g).to(model.precision.compute)
    rows = model.image_rows(8) if model.takes_images else None
    return None if rows is None else images[rows], torch.randint(0, 10, (8,), generator=g)


def test_low_precision_copies_replace_parameters_and_return_float32_gradients() -> None:
    """Gradients of micro-batches must add up in float32, and parameters without gradient or frozen ones keep None."""
    layer = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    layer[1].bias.requires_grad_(False)
    unused = layer.register_parameter("unused", nn.Parameter(torch.ones(3))) or layer.unused
    parameters = dict(layer.named_parameters())
    x = torch.randn(5, 4).bfloat16()
    with LowPrecisionParams([layer], torch.bfloat16).in_place():
        for _ in range(2):  # micro-batches
            y = layer(x)
            y.sum().backward()
        assert layer[1].weight.requires_grad and not layer[1].bias.requires_grad
    assert y.dtype is torch.bfloat16 and dict(layer.named_parameters()) == parameters
    narrow = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).bfloat16()
    narrow.load_state_dict({name: p.bfloat16() for name, p in parameters.items() if name != "unused"})
    narrow(x).sum().backward()
    for name, parameter in narrow.named_parameters():
        found = parameters[name].grad
        if name == "1.bias":
            assert found is None
            continue
        assert found is not None and found.dtype is torch.float32
        assert torch.equal(found, 2 * parameter.grad.float()), "float32 sums of the micro-batches' gradients"
    assert unused.grad is None


def test_parameters_are_restored_after_an_error() -> None:
    layer = nn.Linear(4, 4)
    before = dict(layer.named_parameters())
    with pytest.raises(ZeroDivisionError), LowPrecisionParams([layer], torch.bfloat16).in_place():
        assert layer.weight.dtype is torch.bfloat16
        raise ZeroDivisionError
    assert dict(layer.named_parameters()) == before and layer.weight is before["weight"]


def test_parameters_are_restored_if_copying_runs_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    before = [dict(layer.named_parameters()) for layer in layers]
    copies, real = [], torch.empty_like

    def run_out(*args: Any, **kwargs: Any) -> torch.Tensor:
        copies.append(1)
        if len(copies) > 2:
            raise torch.OutOfMemoryError
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty_like", run_out)
    with pytest.raises(torch.OutOfMemoryError), LowPrecisionParams(layers, torch.bfloat16).in_place():
        raise AssertionError("there was memory")
    assert [dict(layer.named_parameters()) for layer in layers] == before


def test_copies_written_by_an_optimizer_are_used_until_the_parameter_changes() -> None:
    layer = nn.Linear(4, 4)
    params = LowPrecisionParams([layer], torch.bfloat16)
    for p in layer.parameters():
        target = params.target(p)
        assert target is not None and params.target(p) is target
        target.fill_(7)
    assert params.target(nn.Parameter(torch.ones(2))) is None
    params.written(layer.parameters())

    def sevens() -> list[bool]:
        """Return for weight and bias whether the written copy is used, after a backward through it."""
        with params.in_place():
            found = [bool((p == 7).all()) for p in (layer.weight, layer.bias)]
            layer(torch.ones(2, 4).bfloat16()).sum().backward()
        assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in layer.parameters())
        return found

    assert sevens() == sevens() == [True, True]
    with torch.no_grad():
        layer.weight.detach().mul_(2)  # shares the memory, as a shard that is loaded or averaged
    assert sevens() == [False, True]
    params.forget()
    assert sevens() == [False, False]


def test_gradients_stay_in_16_bits_on_request() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(5, 4).bfloat16()
    params, gradients = LowPrecisionParams([layer], torch.bfloat16), []
    for keep in (True, False):
        with params.in_place(keep):
            layer(x).sum().backward()
        gradients.append([p.grad for p in layer.parameters()])
        layer.zero_grad()
    for kept, converted in zip(*gradients, strict=True):
        assert kept is not None and kept.dtype is torch.bfloat16 and torch.equal(kept.float(), converted)


def test_evaluation_computes_in_16_bits(device: torch.device) -> None:
    model = built(device)
    images, _ = batch(model)
    logits = model.predict(images, 8)
    assert logits is not None and logits.dtype is torch.bfloat16
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for _, p in model.named_parameters():
            p.mul_(2)
    assert not torch.equal(logits, model.predict(images, 8)), "copies are of the parameters as they are now"
    assert all(p.dtype is torch.float32 and torch.equal(p, 2 * before[name]) for name, p in model.named_parameters())
