"""Settings of a config.json of another library as fields of a configuration, in both directions."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from vitpar.errors import DataError
from vitpar.limits import MAX_MEASURE
from vitpar.text import literal


@dataclass(frozen=True)
class ConfigKey:
    """A setting of config.json that is a field of a configuration."""

    key: str
    """Name in config.json."""
    field: str
    """Name of vitpar's field."""
    words: Mapping[str, Any] | None = None
    """Its values in vitpar by those in config.json, others are refused; None for numbers, which are the same."""
    usual: Any = None
    """Value of a config.json without it; None if the field is then unknown."""

    def read(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """Return the field by name, or nothing. Raises DataError for a word that vitpar lacks, and for no number."""
        value = said.get(self.key, self.usual)
        if self.words is None:
            usable = value is None or isinstance(value, list | int | float)  # a list has one number a dimension
            if not usable or (isinstance(value, int | float) and not abs(value) <= MAX_MEASURE):
                raise DataError(f"config.json has {self.key} {literal(value)}, which is not a number: correct it")
            return {self.field: value} if isinstance(value, int | float) else {}
        if value is None:
            return {}
        if not isinstance(value, str) or value not in self.words:
            refuse_word(self.key, value, self.words)
        return {self.field: self.words[value]}

    def written(self, config: Any) -> dict[str, Any]:
        """Return the setting by name."""
        value = getattr(config, self.field)
        if self.words is not None:
            value = next(theirs for theirs, ours in self.words.items() if ours == value)
        return {self.key: value}


def numbers(**fields: str) -> tuple[ConfigKey, ...]:
    """Return settings that are numbers. fields: names of vitpar's fields by those in config.json."""
    return tuple(ConfigKey(key, name) for key, name in fields.items())


TRANSFORMERS = (
    *numbers(hidden_size="embed_dim", num_hidden_layers="depth", num_attention_heads="num_heads"),
    *numbers(intermediate_size="mlp_hidden_dim", layer_norm_eps="norm_eps"),
)
"""Settings of most models of transformers."""
TRANSFORMERS_IMAGES = (
    *TRANSFORMERS,
    *numbers(image_size="image_size", patch_size="patch_size", num_channels="channels"),
)
"""Settings of its models of images."""
TIMM = (
    *numbers(img_size="image_size", patch_size="patch_size", in_chans="channels"),
    *numbers(embed_dim="embed_dim", num_heads="num_heads", drop_path_rate="drop_path"),
)
"""Arguments of timm's models, which an export writes."""


def settings_of(config: Any, settings: Iterable[ConfigKey]) -> dict[str, Any]:
    """Return the settings of config.json that a configuration has."""
    return {key: value for setting in settings for key, value in setting.written(config).items()}


def read_settings(
    said: Mapping[str, Any], settings: Iterable[ConfigKey], fixed: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the fields that a config.json gives.

    fixed: settings that have one value, which is also the usual one.

    Raises DataError for a model that computes differently from vitpar's.
    """
    for key, word in (fixed or {}).items():
        if said.get(key, word) != word:
            refuse_word(key, said[key], (word,))
    return {name: value for setting in settings for name, value in setting.read(said).items()}


def refuse_word(key: str, word: object, known: Iterable[str]) -> NoReturn:
    """Raise DataError for a word in config.json that vitpar lacks."""
    raise DataError(f"config.json has {key} {literal(word)}, but only {', '.join(known)} can be imported")


def input_size(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the image size that a config.json of timm gives, by the field's name."""
    own = said.get("pretrained_cfg")
    size = {**said, **(own if isinstance(own, dict) else {})}.get("input_size")
    return {"image_size": size[-1]} if isinstance(size, list) and size else {}


def refuse_other_parts(config: Any, library: str, parts: Mapping[str, Collection[Any]]) -> None:
    """Raise DataError if a field has a value that models of `library` cannot have. parts: values by field."""
    values = {name: getattr(config, name) for name in parts}
    if other := [f"{name} {literal(value)}" for name, value in values.items() if value not in parts[name]]:
        raise DataError(f"{config.name} has {', '.join(other)}, which no model of {library} has: use --format vitpar")


def shortest_ratio(widths: Sequence[int], hidden: Sequence[int]) -> float:
    """Return the shortest ratio for which int(width · ratio) are the hidden features, or those of the first width."""
    exact = [features / max(1, width) for width, features in zip(widths, hidden, strict=True)]
    rounded = [round(each, digits) for digits in range(8) for each in exact]
    # The quotient may be rounded down, and its product with the width then to the next lower number.
    for ratio in (*rounded, *exact, *(math.nextafter(each, math.inf) for each in exact)):
        if [int(width * ratio) for width in widths] == [*hidden]:
            return ratio
    return exact[0]
