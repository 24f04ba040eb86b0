"""Tensors of other libraries as vitpar's, by the tables that the import reads."""

from collections.abc import Mapping

from torch import Tensor

from vitpar.models.config import ModelConfig
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
