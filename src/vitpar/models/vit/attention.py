"""Attention of a Vision Transformer: in its blocks, and for pooling tokens in its head.

Rotary positions of queries and keys have two dimensions (arXiv 2104.09864), as in EVA-02 and DINOv3. Half of a head's
features are rotated by a token's row, half by its column. The tables have a row for every token: those before the
patches are rotated by 0, unless register tokens have a grid of their own.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vitpar.models.compiled import attend_packed, is_whole, linear_heads, multiply, packs_attention, trains_compiled
from vitpar.models.description import AttentionShape
from vitpar.models.layers import MLP, NORMS, StackedLinear, for_every_sample
from vitpar.models.vit.config import ViTConfig
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
        return self.attend_heads(q, k, v)

    def attend_heads(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return what `attend` does, of queries and keys that are complete."""
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


def rope_tables(config: ViTConfig) -> tuple[Tensor, Tensor]:
    """Return (cosines, sines) of all tokens, float32 [tokens, features of a head]."""
    c = config
    before = torch.zeros(c.prefix_tokens, c.head_dim // 2, dtype=torch.float64)
    if c.rope_register_temperature is not None and c.num_reg_tokens:
        side = round(c.num_reg_tokens**0.5)
        rotated = _angles(torch.arange(side).double(), _axial(c.head_dim, c.rope_register_temperature))
        before[c.prefix_tokens - c.num_reg_tokens :] = rotated
    grid = c.image_size // c.patch_size
    if c.rope == "dinov3":
        # Centres of the patches from -1 to 1, in periods from 1 to the temperature.
        places = 2 * (torch.arange(grid).double() + 0.5) / grid - 1
        frequencies = 2 * torch.pi * _axial(c.head_dim, c.rope_temperature)
    else:
        places = torch.arange(grid).double() * ((c.rope_grid or grid) / grid)
        frequencies = _axial(c.head_dim, c.rope_temperature)
    angles = torch.cat([before, _angles(places, frequencies)])
    angles = angles.repeat(1, 2) if c.rope == "dinov3" else angles.repeat_interleave(2, dim=1)
    return angles.cos().float(), angles.sin().float()


def _axial(head_dim: int, temperature: float) -> Tensor:
    """Return the angle of a step to the next row or column, by feature: float64 [head_dim / 4]."""
    return temperature ** (-torch.arange(head_dim // 4).double() / (head_dim // 4))


def _angles(places: Tensor, frequencies: Tensor) -> Tensor:
    """Return the angles of a square grid of tokens: float64 [side², 2 · frequencies]. Rows come before columns."""
    rows, columns = torch.meshgrid(places, places, indexing="ij")
    return torch.cat([place.flatten()[:, None] * frequencies for place in (rows, columns)], dim=1)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor, *, halves: bool) -> Tensor:
    """Rotate queries or keys.

    x: [batch, heads, tokens, features]; the result has the same shape and dtype.
    cosines, sines: [tokens, features]. They are multiplied in at least their own precision.
    halves: whether a feature is rotated with the one half the features away, instead of its neighbour.
    """
    if halves:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
    else:
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([-second, first], dim=-1).flatten(-2)
    return (x * cosines + turned * sines).to(x.dtype)
