"""Tasks of text: masked tokens as in BERT (arXiv:1810.04805), and removed spans as in T5 (arXiv:1910.10683)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np

from vitpar.data.shards.manifest import Specials
from vitpar.data.text.masking import mlm, shift_right, span_lengths, spans
from vitpar.errors import RecipeError
from vitpar.models.config import IGNORED
from vitpar.tasks.task import LOSS, Metric, StepInput, Task

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from vitpar.data.text.tokenizer import WordTable
    from vitpar.models.config import ModelConfig
    from vitpar.parallel.vocabulary import VocabularyPart

SYNTHETIC_TOKENS = 14
"""Ids of a sequence where there are no data."""


@dataclass(frozen=True)
class TextFacts:
    """Facts about packed text that tasks need."""

    vocab_size: int
    """Number of tokens in the vocabulary."""
    tokens: int
    """Largest number of ids in a sequence, without special tokens."""
    specials: Specials
    """Special tokens."""
    words: WordTable | None = field(default=None, compare=False, repr=False)
    """Places where words begin, for masking of whole words; None if they are not needed."""

    @classmethod
    def synthetic(cls, vocab_size: int) -> TextFacts:
        """Return facts about text without data, for checks and benchmarks.

        Raises RecipeError for a vocabulary that is too small for special tokens.
        """
        if vocab_size < 16:
            raise RecipeError(f"a vocabulary of {vocab_size} tokens is too small: use at least 16")
        sentinels = tuple(range(vocab_size - vocab_size // 4, vocab_size))
        return cls(vocab_size, SYNTHETIC_TOKENS, Specials(pad=0, cls=1, sep=2, mask=3, eos=2, sentinels=sentinels))


class MaskedBatch(NamedTuple):
    """Batch of text as a model takes it, for all ranks."""

    inputs: NDArray[np.int64]
    """Token ids, int64 [batch, …]."""
    lengths: NDArray[np.int64]
    """Ids of each input; what follows is padding, int64 [batch]."""
    targets: NDArray[np.int64]
    """Ids to predict, int64 [batch, …], IGNORED elsewhere."""
    sides: Mapping[str, NDArray[np.int64]]
    """Further inputs by name, int64 [batch, …]."""


@dataclass(frozen=True)
class TextTask(Task):
    """Base of tasks that predict tokens. The loss is the mean over all tokens to predict in a step."""

    INPUT: ClassVar[Literal["images", "text"]] = "text"
    SAMPLE: ClassVar[str] = "sequence"
    OUTPUT: ClassVar[str] = "token"
    METRICS: ClassVar[tuple[Metric, ...]] = (Metric("accuracy", share=True),)
    TRAINING_METRICS: ClassVar[tuple[Metric, ...]] = METRICS
    PREDICTS: ClassVar[bool] = False
    MODELS: ClassVar[str] = ""
    """Examples of models for the task, for messages."""

    text: TextFacts = field(default_factory=lambda: TextFacts.synthetic(64))
    """Facts about the data."""

    @property
    def outputs(self) -> int:
        return self.text.vocab_size

    @abstractmethod
    def prepare(self, ids: NDArray[np.int64], lengths: NDArray[np.int64], keys: NDArray[np.int64]) -> MaskedBatch:
        """Return the inputs and targets of a batch.

        ids: int64 [batch, tokens], without special tokens.
        lengths: ids of each sequence, int64 [batch].
        keys: random key of each sequence, int64 [batch].
        """

    def given(self, prepared: MaskedBatch, config: ModelConfig) -> StepInput:
        """Return a prepared batch as tensors for all ranks, without keys, padded to the sizes of the model."""
        import torch

        (tokens,), targets, padding = config.input.shape, config.output_shape[0], self.text.specials.padding
        sides: dict[str, NDArray[Any]] = {"attention_mask": np.arange(tokens) < prepared.lengths[:, None]}
        for name, ids in prepared.sides.items():
            sides[name] = _padded(ids, config.side_inputs[name].shape[0], padding)
        return StepInput(
            torch.from_numpy(_padded(prepared.inputs, tokens, padding)),
            torch.from_numpy(_padded(prepared.targets, targets, IGNORED)),
            sides={name: torch.from_numpy(side) for name, side in sides.items() if name in config.side_inputs},
        )

    def counted_targets(self, labels: Tensor) -> Tensor:
        return labels

    def filling(self, config: ModelConfig) -> Self:
        """Return the task with the longest sequences that `config` takes, for use without data."""
        sizes = [name for name in self.model_options if name != "vocab_size"]
        for tokens in range(2 * max(getattr(config, name, 0) for name in sizes), SYNTHETIC_TOKENS, -1):
            longer = replace(self, text=replace(self.text, tokens=tokens))
            if all(longer.model_options[name] <= getattr(config, name, 0) for name in sizes):
                return longer
        return self

    def refuse_model(self, config: ModelConfig) -> None:
        """Raise RecipeError for a model that does not fit the task or the data."""
        if config.input.dtype is None:
            raise RecipeError(
                f"task '{self.NAME}' reads text, but {config.name} takes images: name a model of text, such as "
                f"--model {self.MODELS}"
            )
        if config.num_classes < self.text.vocab_size:
            raise RecipeError(
                f"{config.name} has a vocabulary of {config.num_classes:,} tokens, but the text has "
                f"{self.text.vocab_size:,}: set model.vocab_size to at least that, or leave it out"
            )
        for name, needed in self.model_options.items():
            if name != "vocab_size" and getattr(config, name, needed) < needed:
                raise RecipeError(
                    f"{config.name} has {name} {getattr(config, name):,}, but the task needs {needed:,} for sequences "
                    f"of {self.text.tokens:,} ids: set model.{name} to at least that, or leave it out"
                )

    def count(self, targets: Tensor, batch: int) -> Tensor:
        """Return the number of tokens to predict, at least 1."""
        return (targets != IGNORED).sum().clamp(min=1)

    def total(self, outputs: Tensor, targets: Tensor, part: VocabularyPart | None = None) -> Tensor:
        """Return the sum of the losses of all tokens to predict. part: of the vocabulary that `outputs` are."""
        from vitpar.parallel.vocabulary import token_losses

        return token_losses(outputs, targets, part).sum()

    def measure(self, outputs: Tensor, targets: Tensor, part: VocabularyPart | None = None) -> Tensor:
        import torch

        from vitpar.parallel.vocabulary import first_hits

        return torch.stack([(targets != IGNORED).sum(), first_hits(outputs, targets, part).sum()]).double()

    def sums(self, outputs: Tensor, targets: Tensor, part: VocabularyPart | None = None) -> Tensor:
        """Return sums over tokens to predict: their number, the loss, the hits."""
        import torch

        number, hits = self.measure(outputs, targets, part)
        return torch.stack([number, self.total(outputs, targets, part).double(), hits])

    def result(self, sums: Tensor) -> dict[str, float]:
        number, loss, hits = sums.tolist()
        number = max(number, 1.0)
        return {LOSS.name: loss / number, "accuracy": hits / number}

    def reference(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return log Σ exp(x) - x of the target's logit x, summed over the tokens to predict of each sequence."""
        wanted = targets != IGNORED
        chosen = outputs.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        return ((outputs.logsumexp(-1) - chosen) * wanted).sum(-1)

    def trial(self) -> tuple[Tensor, Tensor]:
        import torch

        return torch.zeros(1, 1, self.outputs).double(), torch.zeros(1, 1, dtype=torch.int64)


def _padded(ids: NDArray[np.int64], tokens: int, padding: int) -> NDArray[np.int64]:
    """Return ids [batch, tokens], with `padding` after the given ones."""
    return np.pad(ids, ((0, 0), (0, tokens - ids.shape[1])), constant_values=padding)


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
