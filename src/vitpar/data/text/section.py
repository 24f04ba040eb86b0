"""Section `text` of a data set's manifest: sequence length, tokenizer and counts."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import ConfigDict, Field, field_validator, model_validator

from vitpar.limits import MAX_TOKENS
from vitpar.records import Count, Record
from vitpar.text import shown

MAX_VOCABULARY = 1 << 24
"""Tokens in a vocabulary."""
Id = Annotated[int, Field(ge=0, lt=MAX_VOCABULARY)]
"""Number of a token in a vocabulary."""


class Specials(Record):
    """Numbers of a vocabulary's special tokens; None for one that it lacks."""

    model_config = ConfigDict(frozen=True)
    pad: Id | None = None
    """Padding."""
    cls: Id | None = None
    """Start of a sequence, as in BERT."""
    sep: Id | None = None
    """End of a segment, as in BERT."""
    mask: Id | None = None
    """Stand-in for a token to predict."""
    eos: Id | None = None
    """End of a sequence or document."""
    unk: Id | None = None
    """Stand-in for text that the vocabulary lacks."""
    sentinels: tuple[Id, ...] = ()
    """T5's `<extra_id_0>`, `<extra_id_1>`, …, in the order of their numbers in the name."""
    others: tuple[Id, ...] = ()
    """Other tokens that the vocabulary marks as special."""

    @property
    def all(self) -> tuple[int, ...]:
        """Numbers of all special tokens, ascending, each once."""
        named = (self.pad, self.cls, self.sep, self.mask, self.eos, self.unk)
        return tuple(sorted({*(number for number in named if number is not None), *self.sentinels, *self.others}))

    @property
    def padding(self) -> int:
        """Number that fills a batch after the end of a sequence: `pad`, or 0 without one."""
        return self.pad or 0

    @property
    def end(self) -> int | None:
        """Token that ends a document or sequence: `eos`, or else `sep`."""
        return self.sep if self.eos is None else self.eos


class TextSection(Record):
    """Section `text` of `dataset.json`."""

    tokens: int = Field(ge=1, le=MAX_TOKENS)
    """Largest number of ids in a sequence."""
    vocab_size: int = Field(ge=1, le=MAX_VOCABULARY)
    """Number of tokens in the vocabulary: the largest id plus 1."""
    dtype: Literal["uint16", "uint32"]
    """Type of the stored ids, little-endian."""
    tokenizer: Literal["bytes", "file"]
    """Kind of tokenizer."""
    tokenizer_file: str | None = None
    """Name of the tokenizer's file in the folder of the data set; None for `bytes`."""
    tokenizer_sha256: str | None = None
    """SHA-256 of that file, in hexadecimal."""
    specials: Specials
    """Special tokens. Sequences contain none of them but `unk`, and `end` between documents."""
    cross_documents: bool
    """Whether sequences continue over the ends of documents."""
    documents: dict[str, Count]
    """Number of documents with at least one token in each split."""
    ids: dict[str, Count]
    """Number of stored ids in each split."""

    @field_validator("tokenizer_file")
    @classmethod
    def _is_a_name(cls, name: str | None) -> str | None:
        if name is not None and (not name or PurePosixPath(name).name != name or name == ".."):
            raise ValueError(f"the tokenizer '{shown(name)}' is not a file name")
        return name

    @model_validator(mode="after")
    def _specials_are_tokens(self) -> Self:
        if max(self.specials.all, default=0) >= self.vocab_size:
            raise ValueError(f"a special token is outside the vocabulary of {self.vocab_size:,}")
        return self

    @property
    def stored(self) -> np.dtype:
        """Type of the stored ids, little-endian on every machine."""
        return np.dtype(f"<u{np.dtype(self.dtype).itemsize}")
