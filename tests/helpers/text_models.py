"""Small BERTs and T5s, their twins in transformers, and samples with padding."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.foreign_models import randomised
from helpers.oracles import transformers
from vitpar.models import model_config
from vitpar.models.bert.config import BertConfig
from vitpar.models.config import IGNORED
from vitpar.models.t5.config import T5Config
from vitpar.parallel.vocabulary import VocabularyPart, token_losses

TextModel = BertConfig | T5Config
PADDED = IGNORED
"""Target of a token that counts for nothing."""


def bert(**options: Any) -> BertConfig:
    """Return a small BERT."""
    sizes = {"embed_dim": 16, "depth": 2, "num_heads": 4, "mlp_hidden_dim": 24, "vocab_size": 40, "tokens": 12}
    config = model_config("bert_custom", **{"init": "perturbed", **sizes, **options})
    assert isinstance(config, BertConfig)
    return config


def t5(**options: Any) -> T5Config:
    """Return a small T5 whose heads together have more features than a token."""
    sizes = {"embed_dim": 16, "depth": 2, "num_heads": 4, "head_dim": 6, "mlp_hidden_dim": 20, "vocab_size": 40}
    sizes |= {"tokens": 14, "decoder_tokens": 9, "num_buckets": 8, "max_distance": 11}
    config = model_config("t5_custom", **{"init": "perturbed", **sizes, **options})
    assert isinstance(config, T5Config)
    return config


V1_1 = {"activation": "geglu_tanh", "tied": False}


def twin(config: TextModel) -> nn.Module:
    """Return transformers' model with random values of every parameter, in evaluation mode."""
    torch.manual_seed(0)
    if isinstance(config, BertConfig):
        settings = transformers.BertConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.embed_dim,
            num_hidden_layers=config.depth,
            num_attention_heads=config.num_heads,
            intermediate_size=config.mlp_hidden_dim,
            max_position_embeddings=config.positions,
            type_vocab_size=config.token_types,
            layer_norm_eps=config.norm_eps,
            hidden_dropout_prob=config.dropout,
            attention_probs_dropout_prob=config.dropout,
        )
        return randomised(transformers.BertForMaskedLM(settings))
    settings = transformers.T5Config(
        vocab_size=config.vocab_size,
        d_model=config.embed_dim,
        d_kv=config.head_dim,
        d_ff=config.mlp_hidden_dim,
        num_layers=config.depth,
        num_decoder_layers=config.decoder_depth,
        num_heads=config.num_heads,
        relative_attention_num_buckets=config.num_buckets,
        relative_attention_max_distance=config.max_distance,
        feed_forward_proj="relu" if config.gates == 1 else "gated-gelu",
        tie_word_embeddings=config.tied,
        layer_norm_epsilon=config.norm_eps,
        dropout_rate=config.dropout,
        decoder_start_token_id=0,
    )
    model = transformers.T5ForConditionalGeneration(settings)
    if not config.tied:  # upstream: transformers 5 ties them anyway, unless a file has both
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return randomised(model)


def exact_norm(self: Any, x: Tensor) -> Tensor:
    """Compute transformers' ``T5LayerNorm`` in the type of `x`: its own computes the variance in float32."""
    return self.weight * x * (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()


def sample(config: TextModel, batch: int, seed: int = 0) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Return (ids, side inputs, targets) with padding at the end of most samples.

    Targets of padding are `PADDED`, as are those of some tokens of BERT.
    """
    draws = torch.Generator().manual_seed(seed)

    def ids(tokens: int) -> Tensor:
        return torch.randint(1, config.vocab_size, (batch, tokens), generator=draws)  # 0 is padding

    def mask(tokens: int) -> Tensor:
        lengths = torch.randint(1, tokens + 1, (batch, 1), generator=draws)
        return torch.arange(tokens) < torch.where(torch.arange(batch)[:, None] % 3 == 0, tokens, lengths)

    valid = mask(config.tokens)
    x, sides = ids(config.tokens) * valid, {"attention_mask": valid}
    if isinstance(config, BertConfig):
        sides["token_type_ids"] = torch.randint(0, config.token_types, x.shape, generator=draws)
        chosen = torch.rand(x.shape, generator=draws) < 0.6
        chosen[:, 0] = True
        return x, sides, torch.where(valid & chosen, ids(config.tokens), PADDED)
    given = mask(config.decoder_tokens)
    sides |= {"decoder_input_ids": ids(config.decoder_tokens) * given, "decoder_attention_mask": given}
    return x, sides, torch.where(given, ids(config.decoder_tokens), PADDED)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of the tokens whose target is not `PADDED`."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PADDED)


@dataclass(frozen=True)
class TokenLoss:
    """Mean cross-entropy of the tokens whose target is not `PADDED`."""

    def count(self, targets: Tensor, batch: int) -> Tensor:
        return (targets != PADDED).sum()

    def total(self, outputs: Tensor, targets: Tensor, part: VocabularyPart | None = None) -> Tensor:
        return token_losses(outputs, targets, part).sum()

    def measure(self, outputs: Tensor, targets: Tensor, part: VocabularyPart | None = None) -> None:
        return None
