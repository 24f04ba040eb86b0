"""Tokenizers: bytes, and files in the format of the package `tokenizers` (tokenizer.json).

Texts are encoded without special tokens. A special token that is spelled out in a text, such as `[MASK]`, is encoded as
plain characters, so that no document can forge one.
"""

from __future__ import annotations

import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitpar.data.shards.manifest import MAX_VOCABULARY, Specials
from vitpar.data.sources.source import using
from vitpar.errors import DataError
from vitpar.io import read_bytes, read_text
from vitpar.limits import MAX_JSON_BYTES
from vitpar.object_store import ObjectPath
from vitpar.text import shown

BYTES = "bytes"
"""Name of the tokenizer of bytes."""
SENTINELS = 100
"""Sentinels of the tokenizer of bytes, as many as T5's."""
_NAMED = ("pad", "cls", "sep", "mask", "eos", "unk")
BYTE_SPECIALS = Specials(
    **{name: 256 + place for place, name in enumerate(_NAMED)},
    sentinels=tuple(range(256 + len(_NAMED), 256 + len(_NAMED) + SENTINELS)),
)
"""Special tokens after the 256 bytes: pad 256, cls 257, sep 258, mask 259, eos 260, unk 261, sentinels 262 to 361."""

_USUAL: dict[str, tuple[str, ...]] = {
    "pad": ("[PAD]", "<pad>", "<|padding|>", "<|pad|>", "<PAD>"),
    "cls": ("[CLS]", "<cls>", "<s>", "<CLS>"),
    "sep": ("[SEP]", "<sep>", "<SEP>"),
    "mask": ("[MASK]", "<mask>", "<|mask|>", "<MASK>"),
    "eos": ("</s>", "<eos>", "[EOS]", "<|endoftext|>", "<|end_of_text|>", "<EOS>"),
    "unk": ("[UNK]", "<unk>", "<|unk|>", "<UNK>"),
}
"""Names of special tokens in the vocabularies of BERT, T5, RoBERTa and GPT-like models."""
_SPACES = " \t\n\r\v\f"
# Characters of byte-level vocabularies for the bytes of `_SPACES`: GPT-2 maps bytes 0 to 32 to U+0100 and on.
_BYTE_SPACES = "".join(chr(0x100 + ord(space)) for space in _SPACES)
_METASPACE = "▁"
_AGAIN = "save it again with `tokenizers`"


@dataclass(frozen=True)
class WordTable:
    """Where words begin, by token."""

    begins: NDArray[np.bool_]
    """Whether a word begins at the token, bool [vocab_size]."""
    blank: NDArray[np.bool_]
    """Whether the token is only white space, bool [vocab_size]. What follows it belongs to the same word."""
    special: NDArray[np.bool_]
    """Whether the token is special, which makes it a word by itself, bool [vocab_size]."""

    def words(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of each token's word within its sequence, from 0.

        White space before a word belongs to it.

        ids: int64 [batch, tokens], or [tokens].
        """
        special, blank = self.special[ids], self.blank[ids]
        starts = self.begins[ids] | special
        starts[..., 1:] &= special[..., 1:] | ~blank[..., :-1]
        starts[..., 1:] |= special[..., :-1]
        starts[..., 0] = False  # word 0 begins there anyway
        return starts.cumsum(-1)


class Tokenizer(ABC):
    """Conversion of texts to ids and back."""

    vocab_size: int
    """Number of tokens in the vocabulary: the largest id plus 1."""
    specials: Specials
    """Special tokens."""
    file: bytes | None = None
    """Content of the tokenizer's file; None without one."""

    @cached_property
    @abstractmethod
    def words(self) -> WordTable:
        """Where words begin, for masking of whole words."""

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the ids of all texts one after the other, int64 [ids], and their number in each, int64 [texts].

        Raises DataError.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; special tokens by their names."""


class ByteTokenizer(Tokenizer):
    """Tokenizer whose ids 0 to 255 are the bytes of a text in UTF-8, followed by `BYTE_SPECIALS`."""

    vocab_size = BYTE_SPECIALS.all[-1] + 1
    specials = BYTE_SPECIALS

    @cached_property
    def words(self) -> WordTable:
        blank = _mask(self.vocab_size, [ord(space) for space in _SPACES])
        return WordTable(blank, blank, _mask(self.vocab_size, self.specials.all))

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        parts = [text.encode() for text in texts]
        lengths = np.array([len(part) for part in parts], np.int64)
        return np.frombuffer(b"".join(parts), np.uint8).astype(np.int64), lengths

    def decode(self, ids: Sequence[int]) -> str:
        names = {getattr(self.specials, name): f"<{name}>" for name in _NAMED}
        names |= {number: f"<extra_id_{place}>" for place, number in enumerate(self.specials.sentinels)}
        data = b"".join(bytes([i]) if i < 256 else names[i].encode() for i in ids)
        return data.decode("utf-8", errors="replace")


class FileTokenizer(Tokenizer):
    """Tokenizer from the content of a tokenizer.json.

    name: name of the file, for messages.

    Raises DataError for content that is no tokenizer or too large, and without the package `tokenizers`.
    """

    def __init__(self, file: bytes, name: str) -> None:
        try:
            import tokenizers
        except ImportError:
            raise DataError(f"'{name}' needs the package tokenizers: pip install tokenizers") from None
        self.file, self._name = file, name
        with using(f"'{name}' is not a tokenizer.json", _AGAIN):
            self._library = tokenizers.Tokenizer.from_buffer(file)
            # Settings of another program: long padding would fill the memory, and truncation lose text.
            self._library.no_padding()
            self._library.no_truncation()
            self._library.encode_special_tokens = True
            vocabulary: dict[str, int] = self._library.get_vocab(with_added_tokens=True)
            added = {i: token.content for i, token in self._library.get_added_tokens_decoder().items() if token.special}
        if not vocabulary or max(vocabulary.values()) >= MAX_VOCABULARY:
            raise DataError(f"the vocabulary of '{name}' is empty or has ids above {MAX_VOCABULARY - 1:,}")
        self.vocab_size = max(vocabulary.values()) + 1
        self.specials = _specials(vocabulary, added)
        self._vocabulary = vocabulary
        self._is_special = _mask(self.vocab_size, [i for i in self.specials.all if i != self.specials.unk])

    @cached_property
    def words(self) -> WordTable:
        """Where words begin: `##` of WordPiece, `▁` of SentencePiece, `Ġ` of byte-level BPE.

        A vocabulary with none of them has a word for every token.
        """
        begins, blank = np.ones(self.vocab_size, bool), np.zeros(self.vocab_size, bool)
        model = self._library.model
        prefix = getattr(model, "continuing_subword_prefix", None) or "##"
        spaces = _BYTE_SPACES + _METASPACE
        pieces = any(token.startswith(prefix) and token != prefix for token in self._vocabulary)
        marked = sum(token[:1] in spaces for token in self._vocabulary if token)
        for token, i in self._vocabulary.items():
            if type(model).__name__ == "WordPiece" or (pieces and not marked):
                begins[i] = not token.startswith(prefix)
            elif marked:
                begins[i], blank[i] = token[:1] in spaces, token.strip(spaces) == ""
        return WordTable(begins, blank, _mask(self.vocab_size, self.specials.all))

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        with using(f"the tokenizer '{self._name}' fails", _AGAIN):  # it uses all cores
            parts = [one.ids for one in self._library.encode_batch_fast(texts, add_special_tokens=False)]
        lengths = np.array([len(part) for part in parts], np.int64)
        ids = np.fromiter(itertools.chain.from_iterable(parts), np.int64, int(lengths.sum()))
        if len(ids) and ids.max() >= self.vocab_size:
            raise DataError(f"the tokenizer '{self._name}' yields ids outside its vocabulary: save it again")
        kept = ~self._is_special[ids]
        if kept.all():
            return ids, lengths
        owner = np.repeat(np.arange(len(parts)), lengths)[kept]
        return ids[kept], np.bincount(owner, minlength=len(parts))

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._library.decode(list(ids), skip_special_tokens=False)
        return text


def open_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer `bytes`, or the one in a file.

    name: `bytes`, or the path of a tokenizer.json.

    Raises DataError.
    """
    if name == BYTES:
        return ByteTokenizer()
    path = Path(name)
    try:
        text = read_text(path / "tokenizer.json" if path.is_dir() else path, MAX_JSON_BYTES)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(
            f"cannot read the tokenizer '{shown(name)}' ({why}): give `bytes` or a tokenizer.json"
        ) from None
    return FileTokenizer(text.encode(), name)


def load_tokenizer(path: Path | ObjectPath | None, sha256: str | None) -> Tokenizer:
    """Return the tokenizer of a packed data set.

    path: tokenizer.json of the data set; None for the tokenizer of bytes.
    sha256: checksum of the file in the manifest.

    Raises DataError if the file is not the one that the data were packed with.
    """
    if path is None:
        return ByteTokenizer()
    try:
        data = read_bytes(path, MAX_JSON_BYTES)
    except OSError as error:
        raise DataError(f"cannot read '{path}' ({error.strerror}): restore it or pack the data set again") from None
    if hashlib.sha256(data).hexdigest() != sha256:
        raise DataError(f"'{path}' is not the tokenizer that the data set was packed with: restore it")
    return FileTokenizer(data, str(path))


def _specials(vocabulary: Mapping[str, int], added: Mapping[int, str]) -> Specials:
    """Return the special tokens of a vocabulary by their usual names.

    added: tokens that the tokenizer marks as special, by id.
    """
    found: dict[str, Any] = {
        name: next((vocabulary[word] for word in words if word in vocabulary), None) for name, words in _USUAL.items()
    }
    if found["sep"] is None and "<s>" in vocabulary:  # RoBERTa; T5 has no <s>, and its </s> separates nothing
        found["sep"] = vocabulary.get("</s>")
    sentinels: list[int] = []
    while (number := vocabulary.get(f"<extra_id_{len(sentinels)}>")) is not None:
        sentinels.append(number)
    known = {*found.values(), *sentinels}
    return Specials(**found, sentinels=tuple(sentinels), others=tuple(sorted(set(added) - known)))


def _mask(size: int, numbers: Sequence[int]) -> NDArray[np.bool_]:
    return np.isin(np.arange(size), numbers)
