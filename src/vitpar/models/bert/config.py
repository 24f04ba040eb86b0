"""Configuration of BERT and the names it goes by.

Sizes are those of arXiv 1810.04805, names vitpar's or the Hugging Face hub's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from vitpar.errors import ModelError
from vitpar.models.bases import TextConfig, check_fields, padding_mask
from vitpar.models.description import SideInput
from vitpar.text import shown


def _sizes(embed_dim: int, depth: int, num_heads: int, vocab_size: int = 30522) -> dict[str, int]:
    sizes = {"embed_dim": embed_dim, "depth": depth, "num_heads": num_heads, "vocab_size": vocab_size}
    return {**sizes, "mlp_hidden_dim": 4 * embed_dim}


SIZES = {"bert_base": _sizes(768, 12, 12), "bert_large": _sizes(1024, 24, 16)}
"""Fields by the name of a published model."""
_NAMES = {
    **SIZES,
    **{f"bert-{size}-uncased": SIZES[f"bert_{size}"] for size in ("base", "large")},
    **{f"bert-{size}-cased": {**SIZES[f"bert_{size}"], "vocab_size": 28996} for size in ("base", "large")},
}
"""Fields by name, also the hub's."""


@dataclass(frozen=True, repr=False)
class BertConfig(TextConfig):
    """Architecture of a BERT with its head for masked language modelling."""

    FAMILY: ClassVar[str] = "bert"
    NEEDED: ClassVar[tuple[str, ...]] = ("embed_dim", "depth", "num_heads")
    PUBLISHED: ClassVar[tuple[str, ...]] = tuple(SIZES)

    name: str
    """Name of the model; only messages use it."""
    embed_dim: int
    """Features of a token."""
    depth: int
    """Number of blocks."""
    num_heads: int
    """Attention heads of a block; divides `embed_dim`."""
    mlp_hidden_dim: int
    """Hidden features of a block's MLP."""
    vocab_size: int = 30522
    """Number of token ids."""
    tokens: int = 512
    """Tokens of a sample."""
    positions: int = 512
    """Learned positions; at least `tokens`, which use the first ones."""
    token_types: int = 2
    """Number of token types, such as first and second sentence."""
    norm_eps: float = 1e-12
    """Epsilon of every LayerNorm."""
    dropout: float = 0.0
    """Dropout rate after the embeddings, attention projection and MLP; 0.1 in BERT. Attention weights have none."""
    init: Literal["bert", "perturbed"] = "bert"
    """Scheme of initial values: BERT's normal numbers of deviation 0.02. "perturbed" is for tests: no gradient starts
    at zero."""

    def __post_init__(self) -> None:
        name = shown(self.name)
        check_fields(self)
        if self.positions < self.tokens:
            raise ModelError(
                f"{name} has {self.tokens:,} tokens but {shown(self.positions)} positions: use at least as many "
                "positions"
            )

    @classmethod
    def fields_of(cls, name: str) -> Mapping[str, Any] | None:
        return _NAMES.get(name.removeprefix("google-bert/"))

    @classmethod
    def completed(cls, known: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        hidden = {"mlp_hidden_dim": 4 * options["embed_dim"]} if "embed_dim" in options else {}
        return {**(known or {"positions": options.get("tokens", cls.positions)}), **hidden, **options}

    @property
    def head_dim(self) -> int:
        """Features of one attention head."""
        return self.embed_dim // self.num_heads

    @property
    def output_shape(self) -> tuple[int, ...]:
        return self.tokens, self.vocab_size

    @property
    def side_inputs(self) -> Mapping[str, SideInput]:
        types = SideInput((self.tokens,), optional=True)
        return {"attention_mask": padding_mask(self.tokens), "token_type_ids": types}

    @property
    def shared(self) -> Mapping[str, str]:
        return {"head.fc.weight": "embed.word_embeddings.weight"}

    def layers_above(self, parameter: str) -> int:
        # The head's norm follows a linear layer: it is no part of the last block.
        return 0 if parameter.startswith("head.norm.") else super().layers_above(parameter)

    @property
    def tiny(self) -> Self:
        return replace(self, embed_dim=8 * self.num_heads, mlp_hidden_dim=16 * self.num_heads, vocab_size=64)
