"""Tensors of other libraries as vitpar's, by the tables that the import reads."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from vitpar.models.config import ModelConfig
from vitpar.models.initial import initialise
from vitpar.models.layers import LayeredModel
from vitpar.models.rows import Found
from vitpar.weights.foreign import FAMILIES


def found_in(state: Mapping[str, Tensor], config: ModelConfig) -> Found:
    """Return the tensors of a model of the family of `config`, all of whose names are known."""
    found = FAMILIES[config.FAMILY].renamed({name: tuple(tensor.shape) for name, tensor in state.items()})
    assert found is not None and found.unknown == ()
    return found


def converted(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return another library's tensors, values or gradients, by vitpar's names."""
    made = FAMILIES[config.FAMILY].parts(found_in(state, config), config)
    result = {name: part.make(*(state[theirs] for theirs in part.names)) for name, part in made.items()}
    assert {name: tuple(tensor.shape) for name, tensor in result.items()} == {name: config.shape(name) for name in made}
    return result


@torch.no_grad()
def filled(
    config: ModelConfig, state: Mapping[str, Tensor] | None = None, dtype: torch.dtype = torch.float32
) -> LayeredModel:
    """Return a model in evaluation mode with the parameters `state`, or initial values. Shared parameters are one."""
    model = LayeredModel(config)
    initialise(model, 0, config)
    model.to(dtype).eval().tie()
    parameters = dict(model.named_parameters())
    assert state is None or state.keys() == parameters.keys()
    for name, value in (state or {}).items():
        parameters[name].copy_(value)
    for layer in model.layers().values():
        layer.reset_buffers()
    return model


def error(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest error, relative to the largest element."""
    return (ours - theirs).abs().max().item() / max(1e-3, theirs.abs().max().item())


def gradient_errors(ours: LayeredModel, theirs: nn.Module) -> dict[str, float]:
    """Return the `error` of the gradient of each parameter, which all have one, by name."""
    state = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    gradients, found = converted(state, ours.config), {}
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        found[name] = error(parameter.grad, gradients.pop(name))
    assert not gradients
    return found
