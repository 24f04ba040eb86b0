"""Lists of what is not trained: layers and patterns of parameter names, and exceptions, as in ``embed, *, !*.bias``."""

from __future__ import annotations

from fnmatch import fnmatchcase

from vitpar.errors import StrategyError
from vitpar.models.config import ModelConfig
from vitpar.strategy.selectors import blocks_of, layers_of
from vitpar.text import shown


def is_pattern(entry: str) -> bool:
    """Return whether an entry is a pattern of parameter names: it has a dot or a wildcard, and is not `*` alone."""
    return entry != "*" and any(sign in entry for sign in ".*?")


def split_entries(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the entries of a list, and those of its exceptions without their `!`.

    Raises StrategyError for an entry that is neither a pattern nor a selector of layers.
    """
    entries = tuple(part.strip() for part in text.split(","))
    for entry in entries:
        if not is_pattern(name := entry.removeprefix("!").strip()):
            blocks_of(name)
    chosen = tuple(entry for entry in entries if not entry.startswith("!"))
    return chosen, tuple(entry[1:].strip() for entry in entries if entry.startswith("!"))


def parameter_names(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of all parameters of a model, in order, those of copies of shared ones too."""
    return tuple(f"{layer.name}.{name}" for layer in config.layers.values() for name in layer.parameters)


def listed_parameters(text: str, config: ModelConfig) -> frozenset[str]:
    """Return the names of the parameters in a list: those that an entry names and no exception does.

    Raises StrategyError for an invalid entry, one that names nothing, and an exception that excepts nothing.
    """
    chosen, exceptions = split_entries(text)
    every = parameter_names(config)
    named = frozenset[str]().union(*(_named(entry, every, config) for entry in chosen))
    for entry in exceptions:
        if not (left_out := _named(entry, every, config)) & named:
            raise StrategyError(f"'!{shown(entry)}' excepts nothing that the list names: leave it out")
        named -= left_out
    return named


def _named(entry: str, every: tuple[str, ...], config: ModelConfig) -> frozenset[str]:
    """Return which of `every` parameter of a model an entry names."""
    if not is_pattern(entry):
        layers = tuple(f"{name}." for name in layers_of(entry, config.layer_names, config.groups, config.name))
        return frozenset(name for name in every if name.startswith(layers))
    if not (found := frozenset(name for name in every if fnmatchcase(name, entry))):
        raise StrategyError(
            f"'{shown(entry)}' matches no parameter of {config.name}: use a pattern such as *.bias or blocks.0.*"
        )
    return found
