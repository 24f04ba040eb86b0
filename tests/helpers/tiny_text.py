"""Texts and tokenizers for the tests of packed text."""

from pathlib import Path
from typing import Any

import numpy as np

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "wizards", "boxing", "unbelievable")


def documents(number: int, words: int = 30, seed: int = 0) -> list[str]:
    """Return documents of random length, up to `words` words, none of them empty."""
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(WORDS, int(draw.integers(1, words + 1)))) for _ in range(number)]


def write_tokenizer(path: Path, kind: str) -> Any:
    """Train a small tokenizer of `kind` (bert, t5 or gpt) on `documents`, write it, and return the library's object."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from tokenizers import decoders as decode

    texts = documents(200)
    if kind == "bert":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decode.WordPiece()
        names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        trainer: Any = trainers.WordPieceTrainer(vocab_size=60, special_tokens=names)
    elif kind == "t5":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decode.Metaspace()
        names = ["<pad>", "</s>", "<unk>", *(f"<extra_id_{i}>" for i in range(20))]
        trainer = trainers.UnigramTrainer(vocab_size=80, special_tokens=names, unk_token="<unk>")
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decode.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))
    return tokenizer
