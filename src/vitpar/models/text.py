"""Base of the configurations of models of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from vitpar.errors import ModelError
from vitpar.models.config import ModelConfig
from vitpar.models.description import InputSpec, SideInput
from vitpar.text import shown

LOSS_CHUNK = 2**23
"""Most logits whose exponentials the loss has in float32 at once (``vitpar.parallel.vocabulary``): 32 MiB."""


class TextConfig(ModelConfig):
    """Model that takes token ids [batch, tokens] and gives logits [batch, tokens, vocabulary].

    Subclasses have the fields `vocab_size` and `tokens`.
    """

    image_size: ClassVar[int] = 0  # type: ignore[misc]
    """There are no images."""
    channels: ClassVar[int] = 0  # type: ignore[misc]
    """There are no images."""

    vocab_size: int
    """Number of token ids."""
    tokens: int
    """Tokens of a sample that enter the model."""

    @property
    def num_classes(self) -> int:  # type: ignore[override]
        """Logits of each token: the size of the vocabulary."""
        return self.vocab_size

    @property
    def input(self) -> InputSpec:
        return InputSpec((self.tokens,), "int64")


def padding_mask(tokens: int) -> SideInput:
    """Return a mask that is true, or not 0, for tokens to attend to. Without it, all are."""
    return SideInput((tokens,), "bool", optional=True)


def refuse_missing(name: str, options: Mapping[str, Any], needed: set[str]) -> None:
    """Raise ModelError if an option that the model `name` needs is missing."""
    if missing := needed - set(options):
        raise ModelError(f"{shown(name)} needs the model option{'s' * (len(missing) > 1)} {', '.join(sorted(missing))}")
