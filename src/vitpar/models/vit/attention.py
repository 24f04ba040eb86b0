"""Attention of a Vision Transformer: in its blocks, and for pooling tokens in its head."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vitpar.models.compiled import is_whole, linear_heads, multiply, trains_compiled
from vitpar.models.description import AttentionShape
from vitpar.models.layers import MLP, NORMS, StackedLinear, for_every_sample
from vitpar.models.packed_attention import attend_packed, packs_attention
from vitpar.models.vit.config import ViTConfig
from vitpar.models.vit.rope import rope_tables, rotate
from vitpar.sharded import to_local


class Attend(nn.Module):
    """Mixin of modules that compute attention: biases, norms and rotary positions of queries, keys and values.

    They work on however many heads there are here.
    """

    TENSOR_PARALLEL: ClassVar = {"q_norm": "heads", "k_norm": "heads", "q_bias": "per_head", "v_bias": "per_head"}
    cosines: Tensor
    sines: Tensor

    def add_attention(self, config: ViTConfig) -> None:
        """Make parameters and buffers, none of which is filled."""
        c, build = config, NORMS[config.norm]
        self.head_dim = c.head_dim
        apart = c.qkv_bias == "qv"
        self.q_bias = nn.Parameter(torch.empty(c.embed_dim)) if apart else None
        self.v_bias = nn.Parameter(torch.empty(c.embed_dim)) if apart else None
        self.q_norm = build(c.head_dim, eps=c.norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = build(c.head_dim, eps=c.norm_eps) if c.qk_norm else nn.Identity()
        self.config, self.divisible = config, {"head": c.num_heads}
        self.attention_shape = AttentionShape(0, c.num_heads, c.head_dim, packed=c.packs_attention)
        if c.rope != "none":
            for name in ("cosines", "sines"):
                self.register_buffer(name, torch.empty(c.tokens, c.head_dim), persistent=False)

    def fill_tables(self) -> None:
        """Fill the tables of rotary positions."""
        if self.config.rope != "none":
            cosines, sines = rope_tables(self.config)
            self.cosines.copy_(cosines)
            self.sines.copy_(sines)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the outputs of all heads: [batch, tokens, heads · features].

        q, k, v: [batch, heads, tokens, features], as the linear layer gives them.
        """
        if self.q_bias is not None and self.v_bias is not None:
            q, v = (x + to_local(b).view(-1, 1, self.head_dim) for x, b in ((q, self.q_bias), (v, self.v_bias)))
        q, k = self.q_norm(q), self.k_norm(k)
        if self.config.rope != "none":
            halves = self.config.rope == "dinov3"
            q, k = (rotate(x, self.cosines, self.sines, halves=halves) for x in (q, k))
        return rearrange(F.scaled_dot_product_attention(q, k, v), "b h s d -> b s (h d)")


class Attention(Attend):
    """Multi-head self-attention.

    The rows of `qkv` are ordered (head, q|k|v, feature), so that a slice of rows is whole heads.
    """

    TENSOR_PARALLEL: ClassVar = {**Attend.TENSOR_PARALLEL, "qkv": "column", "norm": "inner_norm", "proj": "row"}

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        c = config
        self.qkv = StackedLinear(c.embed_dim, 3 * c.embed_dim, (c.head_dim,) * 3, bias=c.qkv_bias == "all")
        self.add_attention(c)
        self.norm = NORMS[c.norm](c.embed_dim, eps=c.norm_eps) if c.attn_norm else nn.Identity()
        self.proj = nn.Linear(c.embed_dim, c.embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, tokens, width] -> the same shape. Works on however many heads `qkv` gives here."""
        return self.proj(self.attended(x))

    def attended(self, x: Tensor) -> Tensor:
        """Return what `proj` takes: [batch, tokens, heads · features]."""
        whole = trains_compiled() and is_whole(self.qkv)
        if self.config.packs_attention and packs_attention():
            bias = self.qkv.bias if whole else None
            qkv = self.qkv(x) if bias is None else multiply(self.qkv, x, bias.detach())
            return self.norm(attend_packed(qkv, bias, self.head_dim))
        if whole:
            q, k, v = (part.transpose(1, 2) for part in linear_heads(self.qkv, x, self.head_dim))
        else:
            q, k, v = rearrange(self.qkv(x), "b s (h three d) -> three b h s d", three=3, d=self.head_dim).unbind(0)
        return self.norm(self.attend(q, k, v))


class AttentionPool(nn.Module):
    """Attention of one learned query to all patches, and an MLP: [batch, patches, width] -> [batch, 1, width].

    The class token and registers are left out before, as in timm (``pool_include_prefix=False``). The rows of `kv` are
    ordered (head, k|v, feature). timm's ``AttentionPoolLatent``, SigLIP's multi-head attention pooling.
    """

    TENSOR_PARALLEL: ClassVar = {"latent": "heads", "q": "per_head", "kv": "column", "proj": "row", "norm": "norm"}

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        c = config
        self.head_dim, self.divisible = c.head_dim, {"head": c.num_heads}
        self.latent = nn.Parameter(torch.empty(1, 1, c.embed_dim))
        self.q = nn.Linear(c.embed_dim, c.embed_dim)
        self.kv = nn.Linear(c.embed_dim, 2 * c.embed_dim)
        self.proj = nn.Linear(c.embed_dim, c.embed_dim)
        self.norm = NORMS[c.norm](c.embed_dim, eps=c.norm_eps)
        self.mlp = MLP(c.embed_dim, c.mlp_hidden_dim, "gelu" if c.gates > 1 else c.activation)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, patches, width] -> [batch, 1, width]. Works on however many heads `kv` gives here."""
        k, v = rearrange(self.kv(x), "b s (h two d) -> two b h s d", two=2, d=self.head_dim).unbind(0)
        # One query for all samples. Its linear layer is split by heads, but takes all features.
        q = F.linear(for_every_sample(self.latent), to_local(self.q.weight), to_local(self.q.bias))
        q = rearrange(q, "b s (h d) -> b h s d", d=self.head_dim).expand(k.shape[0], -1, -1, -1)
        x = self.proj(rearrange(F.scaled_dot_product_attention(q, k, v), "b h s d -> b s (h d)"))
        return x + self.mlp(self.norm(x))
