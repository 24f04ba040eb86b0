"""Configuration of T5 and the names it goes by.

Sizes are those of arXiv 1910.10683 and of version 1.1 (google-research/text-to-text-transfer-transformer,
released_checkpoints.md). Names are vitpar's or the Hugging Face hub's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from vitpar.errors import ModelError
from vitpar.models.bases import EncoderDecoder, TextConfig, check_fields, padding_mask
from vitpar.models.config import GATED
from vitpar.models.description import SideInput, block_name
from vitpar.text import shown

TABLE = "attn.relative_attention_bias"
"""Name of the table of biases by relative position, in every block of the encoder and the decoder."""


def _sizes(embed_dim: int, depth: int, num_heads: int, head_dim: int, mlp_hidden_dim: int) -> dict[str, Any]:
    sizes = {"embed_dim": embed_dim, "depth": depth, "num_heads": num_heads, "head_dim": head_dim}
    return {**sizes, "mlp_hidden_dim": mlp_hidden_dim}


_OF_1_1 = {"activation": "geglu_tanh", "tied": False}
SIZES: dict[str, dict[str, Any]] = {
    "t5_small": _sizes(512, 6, 8, 64, 2048),
    "t5_base": _sizes(768, 12, 12, 64, 3072),
    "t5_large": _sizes(1024, 24, 16, 64, 4096),
    "t5_3b": _sizes(1024, 24, 32, 128, 16384),
    "t5_v1_1_small": _sizes(512, 8, 6, 64, 1024) | _OF_1_1,
    "t5_v1_1_base": _sizes(768, 12, 12, 64, 2048) | _OF_1_1,
    "t5_v1_1_large": _sizes(1024, 24, 16, 64, 2816) | _OF_1_1,
    "t5_v1_1_xl": _sizes(2048, 24, 32, 64, 5120) | _OF_1_1,
}
"""Fields by the name of a published model; xl has 3 billion parameters, as 3b."""


@dataclass(frozen=True, repr=False)
class T5Config(EncoderDecoder, TextConfig):
    """Architecture of a T5.

    Its blocks are `depth` blocks of the encoder, one layer that embeds the decoder's ids behind the encoder's tokens,
    and `decoder_depth` blocks of the decoder. From there on, activations have the tokens of both.
    """

    FAMILY: ClassVar[str] = "t5"
    NEEDED: ClassVar[tuple[str, ...]] = ("embed_dim", "depth", "num_heads")
    PUBLISHED: ClassVar[tuple[str, ...]] = tuple(SIZES)

    name: str
    """Name of the model; only messages use it."""
    embed_dim: int
    """Features of a token."""
    depth: int
    """Number of blocks of the encoder."""
    decoder_depth: int
    """Number of blocks of the decoder; that of the encoder unless given."""
    num_heads: int
    """Attention heads of a block."""
    head_dim: int
    """Features of one attention head; `num_heads` times this need not be `embed_dim`."""
    mlp_hidden_dim: int
    """Hidden features of a block's MLP; with gates, the products."""
    vocab_size: int = 32128
    """Number of token ids."""
    tokens: int = 512
    """Tokens of a sample in the encoder."""
    decoder_tokens: int = 512
    """Tokens of a sample in the decoder."""
    num_buckets: int = 32
    """Relative positions that have a bias of their own; the encoder uses half of them for each direction."""
    max_distance: int = 128
    """Distance from which on all relative positions share a bias."""
    activation: Literal["relu", "geglu_tanh"] = "relu"
    """Activation of the MLP: ReLU in version 1.0, in 1.1 GELU (its tanh approximation) as the gate of the other half of
    the features."""
    tied: bool = True
    """Whether the output multiplies by the word embeddings, with tokens scaled by ``embed_dim**-0.5``, as in version
    1.0; 1.1 has a matrix of its own for it."""
    norm_eps: float = 1e-6
    """Epsilon of every RMSNorm."""
    dropout: float = 0.0
    """Dropout rate after the embeddings, attention, MLP and the last norm of each stack; 0.1 in T5. Attention weights
    and the hidden features of the MLP have none."""
    init: Literal["t5", "perturbed"] = "t5"
    """Scheme of initial values, transformers' and Mesh TensorFlow's. "perturbed" is for tests: no gradient starts at
    zero."""

    def __post_init__(self) -> None:
        name = shown(self.name)
        check_fields(self)
        # The encoder has half of the buckets for each direction, and half of these for single distances.
        if self.num_buckets < 4 or self.num_buckets % 4:
            raise ModelError(f"num_buckets of {name} is {self.num_buckets}: it must be a multiple of 4")
        if self.max_distance <= self.num_buckets // 2:
            raise ModelError(
                f"max_distance of {name} is {self.max_distance}: it must be above half of num_buckets, which is "
                f"{self.num_buckets // 2}"
            )

    @classmethod
    def fields_of(cls, name: str) -> Mapping[str, Any] | None:
        # Names of the hub are google-t5/t5-small, google/t5-v1_1-small …
        plain = re.sub(r"^google(-t5)?/", "", name).replace("-", "_")
        return SIZES.get({"t5_v1_1_3b": "t5_v1_1_xl"}.get(plain, plain))

    @classmethod
    def completed(cls, known: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        fields = {**known, **options}
        if not known:
            width, heads = fields["embed_dim"], fields["num_heads"]
            fields = {"mlp_hidden_dim": 4 * width, "head_dim": max(1, width // heads), **fields}
        return {"decoder_depth": fields["depth"], **fields}

    @property
    def inner_dim(self) -> int:
        """Features of all heads."""
        return self.num_heads * self.head_dim

    @property
    def gates(self) -> int:
        """Features that the first linear layer of an MLP gives for each hidden one: 2 with gates, else 1."""
        return 2 if self.activation in GATED else 1

    @property
    def side_inputs(self) -> Mapping[str, SideInput]:
        return {
            "attention_mask": padding_mask(self.tokens),
            "decoder_input_ids": SideInput((self.decoder_tokens,)),
            "decoder_attention_mask": padding_mask(self.decoder_tokens),
        }

    @property
    def shared(self) -> Mapping[str, str]:
        words, first = "embed.word_embeddings.weight", self.depth + 1
        copies = {f"{self.dec_embed}.word_embeddings.weight": words}
        copies |= {f"{block_name(index)}.{TABLE}": f"{block_name(0)}.{TABLE}" for index in range(1, self.depth)}
        for index in range(first + 1, first + self.decoder_depth):
            copies[f"{block_name(index)}.{TABLE}"] = f"{block_name(first)}.{TABLE}"
        return copies | ({"head.fc.weight": words} if self.tied else {})

    @property
    def tiny(self) -> Self:
        width = 8 * self.num_heads
        return replace(self, embed_dim=width, head_dim=8, mlp_hidden_dim=2 * width, vocab_size=64)

    @property
    def output_shape(self) -> tuple[int, ...]:
        return self.decoder_tokens, self.vocab_size
