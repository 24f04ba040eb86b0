"""Layers of the Vision Transformer: embed, blocks.0 … blocks.L-1, head."""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vitpar.models.compiled import add_linear, is_plain, kept_sum, scaled, sum_bias_of_branch, trains_compiled, wide
from vitpar.models.description import MODES
from vitpar.models.initial import Rules, constant, lecun_normal, normal, patch_convolution, xavier_uniform
from vitpar.models.keyed_random import drop
from vitpar.models.layers import MLP, NORMS, Layer, ResidualBlock, StackedLinear, activation_of, for_every_sample
from vitpar.models.vit.attention import Attend, Attention, AttentionPool
from vitpar.models.vit.config import ViTConfig
from vitpar.sharded import to_local


def sincos_2d(rows: int, columns: int, width: int, *, of_mae: bool = False) -> Tensor:
    """Return fixed 2-D sine-cosine positions, float32 [rows·columns, width].

    A quarter of the features each is for the sine and cosine of x and y.

    of_mae: whether frequencies are those of the code of masked autoencoders (arXiv 2111.06377), which differ a little
        from those of "Better plain ViT baselines for ImageNet-1k" (arXiv 2205.01580).
    """
    y, x = torch.meshgrid(torch.arange(rows).double(), torch.arange(columns).double(), indexing="ij")
    omega = 10000.0 ** (-torch.arange(width // 4).double() / (width // 4 if of_mae else width // 4 - 1 or 1))
    y, x = y.flatten()[:, None] * omega, x.flatten()[:, None] * omega
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1).float()


def resampling(before: int, after: int) -> Tensor:
    """Return the matrix from positions of a grid of patches to those of another, float64 [after², before²].

    It interpolates as timm's `resample_abs_pos_embed` does, bicubically with antialiasing. A product has the same sums
    in every run; the backward of the interpolation on GPUs adds in any order.
    """
    images = torch.eye(before * before, dtype=torch.float64).view(-1, 1, before, before)
    resized = F.interpolate(images, (after, after), mode="bicubic", antialias=True)
    return resized.flatten(1).T.contiguous()


class PatchEmbed(nn.Module):
    """Patch embedding by one linear: images [batch, channels, height, width] -> [batch, patches, width].

    config: with `patch_size`, `channels` and `embed_dim`.
    """

    TENSOR_PARALLEL: ClassVar = {"proj": "embedding"}

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.patch_size = config.patch_size
        self.proj = nn.Linear(config.channels * config.patch_size**2, config.embed_dim)

    def forward(self, images: Tensor) -> Tensor:
        """images: [batch, channels, size, size], normalised."""
        p = self.patch_size
        return self.proj(rearrange(images, "b c (h p) (w q) -> b (h w) (c p q)", p=p, q=p))


class Positioned(Layer):
    """Base of layers that may add fixed positions to patches, `positions` [1, patches, width].

    grid: patches along a side of the image.
    width: features of a token.
    fixed: function from (rows, columns, width) to the positions, such as `sincos_2d`; None for none.
    """

    TENSOR_MODES: ClassVar[tuple[str, ...]] = MODES
    positions: Tensor

    def __init__(self, grid: int, width: int, fixed: Callable[[int, int, int], Tensor] | None) -> None:
        super().__init__()
        self.grid, self.width, self.first_feature, self.fixed = grid, width, 0, fixed
        if fixed is not None:
            self.register_buffer("positions", torch.empty(1, grid**2, width), persistent=False)

    def take_features(self, index: int, parts: int) -> None:
        self.first_feature = index * self.width // parts
        if self.fixed is not None:
            self.register_buffer("positions", self.positions.chunk(parts, dim=-1)[index].clone(), persistent=False)

    def reset_buffers(self) -> None:
        if self.fixed is not None:
            whole = self.fixed(self.grid, self.grid, self.width)[None]
            self.positions.copy_(whole.narrow(-1, self.first_feature, self.positions.shape[-1]))


class Embed(Positioned):
    """Embedding layer: images [batch, channels, height, width] -> tokens [batch, tokens, width].

    Embeds the patches, prepends the class, distillation and register tokens, adds positions, applies dropout.
    """

    TENSOR_PARALLEL = dict.fromkeys(("cls_token", "dist_token", "reg_token", "pos_embed"), "token")

    def __init__(self, config: ViTConfig) -> None:
        c, d = config, config.embed_dim
        super().__init__(c.image_size // c.patch_size, d, sincos_2d if c.position == "sincos2d" else None)
        self.dropout = c.dropout
        self.patch_embed = PatchEmbed(c)
        self.cls_token = nn.Parameter(torch.empty(1, 1, d)) if c.pool == "cls" else None
        self.dist_token = nn.Parameter(torch.empty(1, 1, d)) if c.distillation else None
        self.reg_token = nn.Parameter(torch.empty(1, c.num_reg_tokens, d)) if c.num_reg_tokens else None
        self.pos_embed = nn.Parameter(torch.empty(1, c.positions, d)) if c.positions else None
        self.of_patches = self.pos_embed is not None and not c.prefix_positions
        self.prefix_tokens = c.prefix_tokens
        self._resampled: dict[tuple[int, torch.dtype], Tensor] = {}  # matrices for other grids

    def forward(self, images: Tensor, keys: Tensor | None = None) -> Tensor:
        """images: [batch, channels, size, size], normalised. keys: int64 [batch] or None (no dropout).

        Images of another size than the configuration's get resampled positions.
        """
        x = self.tokens_of(self.patch_embed(images))
        if self.training and keys is not None and self.dropout:
            x = drop(x, keys, self.dropout, whole_sample=False, first_feature=self.first_feature)
        # FSDP2 and pipelines hold on to what a layer gives: a view of the product, if nothing was added to it.
        return x.clone() if x._is_view() else x

    def tokens_of(self, x: Tensor) -> Tensor:
        """Return all tokens of images, [batch, tokens, width], by the embedded patches, [batch, patches, width]."""
        grid = self.grid if x.shape[1] == self.grid**2 else math.isqrt(x.shape[1])
        if self.fixed is not None:
            x = x + self._positions(self.positions, grid, 0).to(x.dtype)
        elif self.of_patches and self.pos_embed is not None:
            x = x + self._positions(for_every_sample(self.pos_embed), grid, 0)
        prefix = [
            for_every_sample(t).expand(x.shape[0], -1, -1)
            for t in (self.cls_token, self.dist_token, self.reg_token)
            if t is not None
        ]
        x = torch.cat([*prefix, x], dim=1) if prefix else x
        if self.pos_embed is not None and not self.of_patches:
            x = x + self._positions(for_every_sample(self.pos_embed), grid, self.prefix_tokens)
        return x

    def _positions(self, positions: Tensor, grid: int, prefix: int) -> Tensor:
        """Return positions [1, prefix + patches, features] for a grid of patches with another side."""
        if grid == self.grid:
            return positions
        dtype = torch.promote_types(positions.dtype, torch.float32)  # not in 16 bits, as in timm
        if (grid, dtype) not in self._resampled:
            self._resampled[grid, dtype] = resampling(self.grid, grid).to(positions.device, dtype)
        first, patches = positions[:, :prefix], positions[:, prefix:].to(dtype)
        return torch.cat([first, (self._resampled[grid, dtype] @ patches).to(first.dtype)], dim=1)


class LayerScale(nn.Module):
    """Learned factor for each feature of a residual branch; does nothing where the config has none."""

    TENSOR_PARALLEL: ClassVar = {"gamma": "scale"}

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(config.embed_dim)) if config.layer_scale is not None else None

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, tokens, width] -> the same shape."""
        return x if self.gamma is None else x * to_local(self.gamma)


class Block(ResidualBlock):
    """Pre-norm transformer block: tokens [batch, tokens, width] -> the same shape."""

    TENSOR_PARALLEL: ClassVar = {"norm1": "norm", "norm2": "norm"}

    def __init__(self, config: ViTConfig, index: int) -> None:
        c, build = config, NORMS[config.norm]
        super().__init__(index, c.depth, c.embed_dim, drop_path=c.drop_path, dropout=c.dropout)
        self.norm1 = build(c.embed_dim, eps=c.norm_eps)
        self.attn = Attention(c)
        self.ls1 = LayerScale(c)
        self.norm2 = build(c.embed_dim, eps=c.norm_eps)
        normed = build(c.mlp_hidden_dim, eps=c.norm_eps) if c.mlp_norm else None
        self.mlp = MLP(c.embed_dim, c.mlp_hidden_dim, c.activation, normed)
        self.ls2 = LayerScale(c)

    def reset_buffers(self) -> None:
        super().reset_buffers()
        self.attn.fill_tables()

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """x: [batch, tokens, width]. keys: int64 [batch] or None (nothing is dropped)."""
        keys = keys if self.training else None
        if trains_compiled() and self._ends_in_products(keys):
            return self._compiled(x, keys)
        x = kept_sum(x, self.branch(self.attn(self.norm1(x)), keys, 0, self.ls1))
        return x + self.branch(self.mlp(self.norm2(x)), keys, 1, self.ls2)

    def _ends_in_products(self, keys: Tensor | None) -> bool:
        """Return whether `_compiled` can compute the block: nothing but drop-path follows the products of branches."""
        if (keys is not None and self.dropout) or self.ls1.gamma is not None or self.ls2.gamma is not None:
            return False
        return is_plain(self.attn.proj) and is_plain(self.mlp.fc2)

    def _compiled(self, x: Tensor, keys: Tensor | None) -> Tensor:
        """Compute `forward` with the last product and the sums for biases as ``vitpar.models.compiled`` describes."""
        proj, fc2 = self.attn.proj, self.mlp.fc2
        first, second = (self.path_scale(keys, number, wide(x)) for number in (0, 1))
        branch = F.linear(self.attn.attended(self.norm1(x)), proj.weight, proj.bias.detach())
        x = kept_sum(sum_bias_of_branch(x, proj.bias, first), scaled(branch, first))
        # Scaling commutes with the product, and costs nothing in the kernel of the activation.
        hidden = scaled(self.mlp.hidden(self.norm2(x)), second)
        return add_linear(x, hidden, fc2.weight, fc2.bias, second)


class ParallelBlock(ResidualBlock, Attend):
    """Pre-norm transformer block whose attention and MLP stand side by side (arXiv 2302.05442).

    The rows of `in_proj` are ordered (head, q|k|v|hidden, feature), and the columns of `out_proj` (head,
    attended|hidden, feature), where every head has its part of the hidden features. So a slice is whole heads, and a
    block needs one collective before and one after its products, instead of two.
    """

    TENSOR_PARALLEL: ClassVar = {
        **Attend.TENSOR_PARALLEL,
        **{"norm1": "norm", "in_proj": "column", "mlp_bias": "per_head", "activation": "gate", "out_proj": "row"},
    }

    def __init__(self, config: ViTConfig, index: int) -> None:
        c = config
        ResidualBlock.__init__(self, index, c.depth, c.embed_dim, drop_path=c.drop_path, dropout=c.dropout)
        self.add_attention(c)
        hidden = c.gates * c.mlp_hidden_dim
        self.hidden_of_head = hidden // c.num_heads
        self.divisible |= {"hidden feature": c.mlp_hidden_dim}
        self.norm1 = NORMS[c.norm](c.embed_dim, eps=c.norm_eps)
        stacked = (*(c.head_dim,) * 3, self.hidden_of_head)  # gates and values alternate, and count as one map here
        self.in_proj = StackedLinear(c.embed_dim, 3 * c.embed_dim + hidden, stacked, bias=c.qkv_bias == "all")
        self.mlp_bias = None if c.qkv_bias == "all" else nn.Parameter(torch.empty(hidden))
        self.activation = activation_of(c.activation)
        self.out_proj = nn.Linear(c.embed_dim + c.mlp_hidden_dim, c.embed_dim)
        self.ls1 = LayerScale(c)

    def reset_buffers(self) -> None:
        ResidualBlock.reset_buffers(self)
        self.fill_tables()

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """x: [batch, tokens, width]. keys: int64 [batch] or None (nothing is dropped)."""
        d = self.head_dim
        heads = self.in_proj(self.norm1(x)).unflatten(-1, (-1, 3 * d + self.hidden_of_head))
        q, k, v, hidden = heads.split([d, d, d, self.hidden_of_head], dim=-1)
        if self.mlp_bias is not None:
            hidden = hidden + to_local(self.mlp_bias).view(-1, self.hidden_of_head)
        attended = self.attend(*(part.transpose(1, 2) for part in (q, k, v)))
        both = torch.cat([attended.unflatten(-1, (-1, d)), self.activation(hidden)], dim=-1).flatten(-2)
        return x + self.branch(self.out_proj(both), keys if self.training else None, 0, self.ls1)


class Head(Layer):
    """Head layer: tokens [batch, tokens, width] -> logits [batch, classes].

    Norm and pooling, optional representation layer, classifier. With a distillation token logits are the mean of two
    classifiers.
    """

    TENSOR_PARALLEL: ClassVar = {
        **{"norm": "norm", "pooled": "pooled", "representation": "representation"},
        **{"fc": "classifier", "fc_dist": "classifier"},
    }
    TENSOR_MODES = MODES
    distilled_training = False
    """Whether a training gets the logits of both classifiers side by side, [batch, 2 · classes]."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        c = config
        features = c.representation_size or c.embed_dim
        self.pool, self.fc_norm, self.prefix_tokens = c.pool, c.fc_norm, c.prefix_tokens
        self.norm = NORMS[c.norm](c.embed_dim, eps=c.norm_eps)
        self.attn_pool = AttentionPool(c) if c.pool == "map" else None
        self.pooled = nn.Identity()  # a place for collectives
        self.representation = nn.Linear(c.embed_dim, features) if c.representation_size else None
        self.fc = nn.Linear(features, c.num_classes)
        self.fc_dist = nn.Linear(features, c.num_classes) if c.distillation else None
        self.divisible = {"classifier feature": features}

    def _features(self, x: Tensor) -> Tensor:
        x = self.pooled(x)
        return x if self.representation is None else torch.tanh(self.representation(x))

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, tokens, width] -> [batch, classes]."""
        if self.attn_pool is not None:
            return self.fc(self._features(self.attn_pool(self.norm(x[:, self.prefix_tokens :]))[:, 0]))
        if self.fc_norm:
            return self.fc(self._features(self.norm(x[:, self.prefix_tokens :].mean(dim=1))))
        if self.pool == "avg":
            return self.fc(self._features(self.norm(x)[:, self.prefix_tokens :].mean(dim=1)))
        if self.fc_dist is None:
            return self.fc(self._features(self.norm(x[:, 0])))
        x = self.norm(x[:, :2])
        labelled, taught = self.fc(self._features(x[:, 0])), self.fc_dist(self._features(x[:, 1]))
        if self.distilled_training and self.training:
            return torch.cat([labelled, taught], dim=1)
        return (labelled + taught) / 2


def build_block(config: ViTConfig, index: int) -> Layer:
    """Return a block by its number."""
    return (ParallelBlock if config.parallel_blocks else Block)(config, index)


# timm's trunc_normal_ cuts at ±2, which is 100 deviations here: it cuts nothing off.
_TIMM_FOR_ALL: Rules = (
    ("*norm*.weight", constant(1.0)),
    ("*norm*.bias", constant(0.0)),
    ("*.gamma", lambda v, shape, c: torch.full_like(v, c.layer_scale or 0.0)),
    ("embed.pos_embed", normal(0.02)),
    ("embed.dist_token", normal(0.02)),
    ("*_token", normal(1e-6)),
    ("*_bias", constant(0.0)),
    ("head.attn_pool.latent", lambda v, shape, c: normal(c.embed_dim**-0.5)(v, shape, c)),
)

SCHEMES: dict[str, Rules] = {
    "jax": (
        *_TIMM_FOR_ALL,
        ("embed.patch_embed.proj.weight", lecun_normal),
        ("head.representation.weight", lecun_normal),
        ("head.attn_pool.*.weight", xavier_uniform()),
        ("head.*.weight", constant(0.0)),
        ("*.mlp.*.bias", normal(1e-6)),
        ("*.bias", constant(0.0)),
        ("*.weight", xavier_uniform()),
    ),
    "timm": (
        *_TIMM_FOR_ALL,
        ("embed.patch_embed.proj.*", patch_convolution),
        ("*.bias", constant(0.0)),
        ("*.weight", normal(0.02)),
    ),
    "moco": (
        *_TIMM_FOR_ALL,
        ("embed.patch_embed.proj.*", patch_convolution),
        ("*.bias", constant(0.0)),
        ("*.qkv.weight", xavier_uniform(parts=3)),
        ("*.weight", xavier_uniform()),
    ),
    # A classifier of zeros stops all other gradients: what compares plans starts where every parameter has one.
    "perturbed": (
        ("*norm*.weight", normal(0.1, mean=1.0)),
        ("*.gamma", lambda v, shape, c: normal(0.1, mean=1.0)(v, shape, c).mul_(c.layer_scale or 0.0)),
        ("embed.pos_embed", normal(0.02)),
        ("*_token", normal(0.05)),
        ("*.latent", normal(0.05)),
        ("*bias", normal(0.05)),
        ("blocks.*.weight", xavier_uniform()),
        ("*.weight", lecun_normal),
    ),
}
"""The rules of each scheme, as timm's ``weight_init`` (docs/models.md); "perturbed" is vitpar's, for tests."""
