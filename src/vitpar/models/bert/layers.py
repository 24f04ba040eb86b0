"""Layers of BERT: embed, blocks.0 …, and a head with logits for every token.

Under tensor parallelism a block may compute only some of its heads and hidden features here.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitpar.models.bert.config import BertConfig
from vitpar.models.initial import Rules, constant, lecun_normal, normal
from vitpar.models.layers import MLP, Layer, LayerNorm, for_every_sample
from vitpar.models.text_layers import Embedding, SelfAttention, TextLayer, TokenLogits


class Embed(TextLayer):
    """Embedding layer: token ids [batch, tokens] -> tokens [batch, tokens, width]. Sum of three embeddings, norm."""

    TENSOR_PARALLEL: ClassVar = {"word_embeddings": "vocabulary_embedding", "pos_embed": "token", "norm": "norm"}

    def __init__(self, config: BertConfig) -> None:
        super().__init__(0, config.dropout)
        c = config
        self.word_embeddings = Embedding(c.vocab_size, c.embed_dim)
        self.pos_embed = nn.Parameter(torch.empty(1, c.positions, c.embed_dim))
        self.token_type_embeddings = Embedding(c.token_types, c.embed_dim)
        self.norm = LayerNorm(c.embed_dim, eps=c.norm_eps)

    def forward(self, ids: Tensor, token_type_ids: Tensor | None = None, keys: Tensor | None = None) -> Tensor:
        """ids, token_type_ids: int64 [batch, tokens]; None for type 0 everywhere. Returns [batch, tokens, width]."""
        types = torch.zeros_like(ids) if token_type_ids is None else token_type_ids
        x = self.word_embeddings(ids) + self.token_type_embeddings(types)
        return self.dropped(self.norm(x + for_every_sample(self.pos_embed)[:, : ids.shape[1]]), keys, 0)


class Block(TextLayer):
    """Post-norm block: tokens [batch, tokens, width] -> the same shape."""

    TENSOR_PARALLEL: ClassVar = {"norm1": "norm", "norm2": "norm"}
    GROUP_SIDES = ("attention_mask",)

    def __init__(self, config: BertConfig, index: int) -> None:
        super().__init__(1 + index, config.dropout)
        self.attn = SelfAttention(config)
        self.norm1 = LayerNorm(config.embed_dim, eps=config.norm_eps)
        self.mlp = MLP(config.embed_dim, config.mlp_hidden_dim)
        self.norm2 = LayerNorm(config.embed_dim, eps=config.norm_eps)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, keys: Tensor | None = None) -> Tensor:
        """Return the tokens.

        x: [batch, tokens, width].
        attention_mask: int or bool [samples of the tensor-parallel group, tokens], 0 for padding; None for none.
        keys: int64 [batch] or None (nothing is dropped).
        """
        x = self.norm1(x + self.dropped(self.attn(x, attention_mask), keys, 0))
        return self.norm2(x + self.dropped(self.mlp(x), keys, 1))


class Head(Layer):
    """Head for masked language modelling: tokens [batch, tokens, width] -> logits [batch, tokens, vocabulary]."""

    TENSOR_PARALLEL: ClassVar = {"norm": "norm", "fc": "vocabulary_output"}

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.embed_dim, config.embed_dim)
        self.norm = LayerNorm(config.embed_dim, eps=config.norm_eps)
        self.fc = TokenLogits(config.embed_dim, config.vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, tokens, width] -> [batch, tokens, vocabulary]."""
        return self.fc(self.norm(F.gelu(self.dense(x))))


build_block = Block


SCHEMES: dict[str, Rules] = {
    # arXiv 1810.04805 cuts the normal numbers at two deviations, transformers does not.
    "bert": (
        ("*norm*.weight", constant(1.0)),
        ("*.bias", constant(0.0)),
        ("*", normal(0.02)),
    ),
    # Embeddings as large as what follows them, so that mistakes in any of them show.
    "perturbed": (
        ("*norm*.weight", normal(0.1, mean=1.0)),
        ("*embed*", normal(0.5)),
        ("*.bias", normal(0.05)),
        ("*.weight", lecun_normal),
    ),
}
"""The rules of each scheme; the first pattern that matches a parameter's name decides."""
