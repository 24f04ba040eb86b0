"""Span corruption, as in T5 (arXiv:1910.10683)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vitpar.data.text.masking import shift_right, span_lengths, spans
from vitpar.errors import RecipeError
from vitpar.tasks.text import MaskedBatch, TextTask

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from vitpar.models.config import ModelConfig


@dataclass(frozen=True)
class SpanCorruption(TextTask):
    """Prediction of removed spans: 15 % of each sequence, in spans of 3 tokens on average."""

    NAME: ClassVar[str] = "span"
    MODELS: ClassVar[str] = "t5_small"

    rate: float = 0.15
    """Part of the tokens to remove."""
    mean_length: float = 3.0
    """Mean length of a span, in tokens."""

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise ValueError(f"rate is {self.rate}, which is not between 0 and 1")
        if self.mean_length < 1:
            raise ValueError(f"mean_length is {self.mean_length}, which is below 1")

    @property
    def model_options(self) -> Mapping[str, Any]:
        inputs, targets = span_lengths(self.text.tokens, self.rate, self.mean_length)
        return {"vocab_size": self.text.vocab_size, "tokens": inputs, "decoder_tokens": targets}

    def refuse_model(self, config: ModelConfig) -> None:
        super().refuse_model(config)
        if "decoder_input_ids" not in config.side_inputs:
            raise RecipeError(
                f"task '{self.NAME}' needs a decoder, which {config.name} does not have: name a model such as --model "
                f"{self.MODELS}, or use --task mlm"
            )

    def prepare(self, ids: NDArray[np.int64], lengths: NDArray[np.int64], keys: NDArray[np.int64]) -> MaskedBatch:
        """Return texts with sentinels for their missing spans; the decoder's inputs are the targets, shifted."""
        corrupted = spans(ids, lengths, keys, self.text.specials, self.rate, self.mean_length)
        sides = {"decoder_input_ids": shift_right(corrupted.targets, self.text.specials)}
        return MaskedBatch(corrupted.inputs, corrupted.lengths, corrupted.targets, sides)
