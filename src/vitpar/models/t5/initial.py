"""Initial values of T5's parameters (``vitpar.models.initial``)."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from vitpar.models.initial import Rules, constant, lecun_normal, normal
from vitpar.models.t5.config import T5Config


def _deviation(of: Callable[[T5Config], float]) -> Callable[..., Tensor]:
    """Return the rule of normal numbers whose standard deviation is a function of the configuration."""
    return lambda v, shape, c: normal(of(c))(v, shape, c)


def _queries_keys_values(v: Tensor, shape: torch.Size, c: T5Config, start: int) -> Tensor:
    """Return normal numbers, those of queries divided by the root of a head's features: attention does not scale."""
    rows = torch.arange(start, start + v.numel()) // shape[1]
    queries = rows // c.head_dim % 3 == 0
    return normal(c.embed_dim**-0.5)(v, shape, c).mul_(torch.where(queries, c.head_dim**-0.5, 1.0))


_queries_keys_values.by_place = True  # type: ignore[attr-defined]

SCHEMES: dict[str, Rules] = {
    "t5": (
        ("*norm*.weight", constant(1.0)),
        ("*.word_embeddings.weight", normal(1.0)),
        ("head.fc.weight", normal(1.0)),
        ("*.relative_attention_bias", _deviation(lambda c: c.embed_dim**-0.5)),
        ("*.attn.qkv.weight", _queries_keys_values),
        ("*.cross_attn.q.weight", _deviation(lambda c: (c.embed_dim * c.head_dim) ** -0.5)),
        ("*.proj.weight", _deviation(lambda c: c.inner_dim**-0.5)),
        ("*.fc2.weight", _deviation(lambda c: c.mlp_hidden_dim**-0.5)),
        ("*", _deviation(lambda c: c.embed_dim**-0.5)),
    ),
    # Biases by relative position as large as the scores, so that mistakes in them show.
    "perturbed": (
        ("*norm*.weight", normal(0.1, mean=1.0)),
        ("*.relative_attention_bias", normal(0.5)),
        ("*.word_embeddings.weight", normal(math.sqrt(0.5))),
        ("*", lecun_normal),
    ),
}
"""The rules of each scheme; the first pattern that matches a parameter's name decides."""
