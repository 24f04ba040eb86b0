"""Survey of packed text: counts of documents, sequences and tokens, and decoded samples."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

import numpy as np

from vitpar.data.images import BadImage
from vitpar.data.shards.manifest import read_manifest
from vitpar.data.text.text_set import TextSet
from vitpar.errors import DataError

SAMPLES = 3
"""Sequences of a split that are decoded."""


class TextSplitSurvey(TypedDict):
    """Counts of a split of text."""

    documents: int
    """Number of documents."""
    samples: int
    """Number of sequences."""
    ids: int
    """Number of tokens in all sequences."""
    length: list[int]
    """Tokens in a sequence: [minimum, three quartiles, maximum]."""
    mean_length: float
    """Mean number of tokens in a sequence."""
    shards: int
    """Number of shards."""
    bytes: int
    """Bytes of all shards."""
    fingerprint: str
    """Checksum of the sequences and their order."""
    decoded: list[str]
    """Text of the first `SAMPLES` sequences."""


class TextSurvey(TypedDict):
    """Counts of a data set of text, ready for JSON."""

    folder: str
    """Folder of the data set, as given."""
    tokens: int
    """Largest number of tokens in a sequence."""
    tokenizer: str
    """`bytes`, or the name of the tokenizer's file."""
    vocab_size: int
    """Number of tokens in the vocabulary."""
    specials: dict[str, int | list[int] | None]
    """Special tokens by name; None for one that the vocabulary lacks."""
    cross_documents: bool
    """Whether sequences continue over the ends of documents."""
    splits: dict[str, TextSplitSurvey]
    """Survey of each split, by name."""


def text_survey(folder: str | Path) -> TextSurvey:
    """Survey the text in `folder`.

    Raises DataError as `TextSet.open` does, and for damaged samples or another tokenizer.
    """
    splits: dict[str, TextSplitSurvey] = {}
    manifest = read_manifest(folder)
    assert manifest.text is not None, "the caller has looked"
    for name in manifest.splits:
        text = TextSet.open(folder, name)
        try:
            decoded = [text.decode(i) for i in range(min(SAMPLES, len(text)))]
        except BadImage as error:
            raise DataError(f"a sample of '{name}' in '{folder}' is damaged: {error}") from None
        splits[name] = {
            "documents": text.documents,
            "samples": len(text),
            "ids": int(text.lengths.sum()),
            "length": np.quantile(text.lengths, (0, 0.25, 0.5, 0.75, 1), method="nearest").tolist(),
            "mean_length": float(text.lengths.mean()),
            "shards": len(text.files),
            "bytes": text.bytes,
            "fingerprint": text.fingerprint,
            "decoded": decoded,
        }
    section = manifest.text
    return {
        "folder": str(folder),
        "tokens": section.tokens,
        "tokenizer": section.tokenizer_file or "bytes",
        "vocab_size": section.vocab_size,
        "specials": section.specials.model_dump(mode="json"),
        "cross_documents": section.cross_documents,
        "splits": splits,
    }
