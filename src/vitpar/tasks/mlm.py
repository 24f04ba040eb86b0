"""Masked language modelling, as in BERT (arXiv:1810.04805)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vitpar.data.text.masking import mlm
from vitpar.tasks.text import MaskedBatch, TextTask

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class MaskedLanguage(TextTask):
    """Prediction of masked tokens: 15 % of each sequence, of which 80 % are masked, 10 % replaced, 10 % kept."""

    NAME: ClassVar[str] = "mlm"
    MODELS: ClassVar[str] = "bert_base"

    rate: float = 0.15
    """Part of the tokens to predict."""
    whole_words: bool = False
    """Whether all tokens of a word are masked together."""

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise ValueError(f"rate is {self.rate}, which is not between 0 and 1")

    @property
    def _before(self) -> int:
        """Special tokens before a sequence."""
        return int(self.text.specials.cls is not None)

    @property
    def model_options(self) -> Mapping[str, Any]:
        after = int(self.text.specials.end is not None)
        return {"vocab_size": self.text.vocab_size, "tokens": self.text.tokens + self._before + after}

    def prepare(self, ids: NDArray[np.int64], lengths: NDArray[np.int64], keys: NDArray[np.int64]) -> MaskedBatch:
        """Return sequences between [CLS] and [SEP], with masked tokens."""
        import numpy as np

        specials, before = self.text.specials, self._before
        inputs = np.full((len(ids), self.model_options["tokens"]), specials.padding, np.int64)
        inputs[:, before : before + ids.shape[1]] = ids
        rows, whole = np.flatnonzero(lengths), lengths.copy()
        if specials.cls is not None:
            inputs[rows, 0] = specials.cls
            whole[rows] += 1
        if specials.end is not None:
            inputs[rows, whole[rows]] = specials.end
            whole[rows] += 1
        words = self.text.words.words(inputs) if self.whole_words and self.text.words is not None else None
        masked, targets = mlm(inputs, whole, keys, specials, self.text.vocab_size, self.rate, words)
        return MaskedBatch(masked, whole, targets, {})
