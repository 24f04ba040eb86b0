"""Layers of the Swin Transformer: embed, blocks.0 … of all stages, head.

Under tensor parallelism an activation may have only some of its features and samples here, and attention only some of
its heads; its tokens are always complete. So nothing below reads the width of a token from the configuration.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vitpar.models.description import MODES, AttentionShape
from vitpar.models.initial import Rules, constant, lecun_normal, normal, patch_convolution
from vitpar.models.layers import MLP, Layer, LayerNorm, ResidualBlock, StackedLinear
from vitpar.models.swin.config import SwinConfig, SwinStage
from vitpar.models.vit.layers import PatchEmbed
from vitpar.sharded import to_local

MASKED = -100.0
"""Number added to the scores of tokens that are neighbours only because the image was rolled; timm's."""


def shift_mask(grid: int, window: int, shift: int) -> Tensor:
    """Return MASKED where a query and a key were not neighbours before the roll, else 0: [windows, window², window²].

    Rolling by `shift` brings the first rows and columns of tokens to the end, into windows of the last ones.
    """
    place = torch.arange(grid)
    region = (place >= grid - window).long() + (place >= grid - shift)
    regions = 3 * region[:, None] + region
    tokens = rearrange(regions, "(i p) (j q) -> (i j) (p q)", p=window, q=window)
    return torch.where(tokens[:, :, None] == tokens[:, None, :], 0.0, MASKED)


class NormedPatchEmbed(PatchEmbed):
    """Patch embedding by one linear and a norm: images [batch, channels, height, width] -> [batch, patches, width]."""

    TENSOR_PARALLEL: ClassVar = {**PatchEmbed.TENSOR_PARALLEL, "norm": "norm"}

    def __init__(self, config: SwinConfig) -> None:
        super().__init__(config)
        self.norm = LayerNorm(config.embed_dim, eps=config.norm_eps)

    def forward(self, images: Tensor) -> Tensor:
        """images: [batch, channels, size, size], normalised."""
        return self.norm(super().forward(images))


class Embed(Layer):
    """Embedding layer: images [batch, channels, height, width] -> tokens [batch, tokens, width]."""

    TENSOR_MODES = MODES

    def __init__(self, config: SwinConfig) -> None:
        super().__init__()
        self.patch_embed = NormedPatchEmbed(config)

    def forward(self, images: Tensor, keys: Tensor | None = None) -> Tensor:
        """images: [batch, channels, size, size], normalised. keys: ignored, since nothing is dropped here."""
        return self.patch_embed(images)


class PatchMerging(nn.Module):
    """Merge two by two tokens: [batch, tokens, width] -> [batch, tokens/4, 2·width].

    The merged features are ordered (feature, neighbour), unlike timm's (neighbour, feature): a slice of the features of
    a token becomes a slice of the merged ones.
    """

    TENSOR_PARALLEL: ClassVar = {"norm": "norm", "reduction": "merge"}

    def __init__(self, config: SwinConfig, before: SwinStage) -> None:
        super().__init__()
        self.grid = before.grid
        self.norm = LayerNorm(4 * before.width, eps=config.norm_eps)
        self.reduction = nn.Linear(4 * before.width, 2 * before.width, bias=False)
        self.divisible = {"incoming feature": before.width}

    def forward(self, x: Tensor) -> Tensor:
        """x: tokens of the previous stage, [batch, tokens, width]."""
        half = self.grid // 2
        return self.reduction(self.norm(rearrange(x, "b (i p j q) c -> b (i j) (c q p)", i=half, p=2, j=half, q=2)))


class WindowAttention(nn.Module):
    """Multi-head self-attention within windows, with a learned bias for each relative position and head.

    The rows of `qkv` are ordered (head, q|k|v, feature), so that a slice of rows is whole heads.

    shift: number of tokens by which the windows are shifted down and right; 0 for none.
    """

    TENSOR_PARALLEL: ClassVar = {"relative_position_bias_table": "per_head", "qkv": "column", "proj": "row"}
    relative_position_index: Tensor
    shift_mask: Tensor

    def __init__(self, stage: SwinStage, shift: int) -> None:
        super().__init__()
        self.grid, self.window, self.shift, self.head_dim = stage.grid, stage.window, shift, stage.head_dim
        offsets, tokens = 2 * stage.window - 1, stage.window**2
        self.relative_position_bias_table = nn.Parameter(torch.empty(stage.num_heads, offsets, offsets))
        self.qkv = StackedLinear(stage.width, 3 * stage.width, (stage.head_dim,) * 3)
        self.proj = nn.Linear(stage.width, stage.width)
        self.divisible = {"head": stage.num_heads}
        self.attention_shape = AttentionShape(0, stage.num_heads, stage.head_dim, stage.windows, biased=True)
        index = torch.empty(tokens, tokens, dtype=torch.int64)
        self.register_buffer("relative_position_index", index, persistent=False)
        if shift:
            self.register_buffer("shift_mask", torch.empty(stage.windows, tokens, tokens), persistent=False)

    def reset_buffers(self) -> None:
        """Fill the places in the flat table of biases of each (query, key), and the mask of the shift."""
        places = torch.arange(self.window)
        rows, columns = (place.flatten() for place in torch.meshgrid(places, places, indexing="ij"))
        rows, columns = (place[:, None] - place + self.window - 1 for place in (rows, columns))
        self.relative_position_index.copy_(rows * (2 * self.window - 1) + columns)
        if self.shift:
            self.shift_mask.copy_(shift_mask(self.grid, self.window, self.shift))

    def _added_to_scores(self, dtype: torch.dtype) -> Tensor:
        """Return the biases, and the mask of the shift: [windows · heads here, window², window²]."""
        table = to_local(self.relative_position_bias_table).flatten(1)
        # At least float32: the gradient of a bias sums those of many scores.
        table = table.to(torch.promote_types(table.dtype, torch.float32))
        bias = table[:, self.relative_position_index]
        windows = (self.grid // self.window) ** 2
        bias = bias + self.shift_mask[:, None] if self.shift else bias.expand(windows, *bias.shape)
        return bias.flatten(0, 1).to(dtype)

    def _rolled(self, x: Tensor, tokens: int) -> Tensor:
        image = x.unflatten(1, (self.grid, self.grid))
        return image.roll((tokens, tokens), (1, 2)).flatten(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, tokens, width] -> the same shape. Works on however many heads `qkv` gives here."""
        window, across = self.window, self.grid // self.window
        x = self._rolled(x, -self.shift) if self.shift else x
        # Windows stand beside the heads, not the samples: all samples share one mask, which is never repeated.
        q, k, v = rearrange(
            self.qkv(x),
            "b (i p j q) (h three d) -> three b (i j h) (p q) d",
            i=across,
            p=window,
            j=across,
            q=window,
            three=3,
            d=self.head_dim,
        ).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=self._added_to_scores(q.dtype)[None])
        x = rearrange(x, "b (i j h) (p q) d -> b (i p j q) (h d)", i=across, j=across, p=window, q=window)
        x = self.proj(x)
        return self._rolled(x, self.shift) if self.shift else x


class Block(ResidualBlock):
    """Pre-norm block with attention in windows: tokens [batch, tokens, width] -> the same shape.

    The first block of every stage but the first begins by merging patches; it takes the tokens of the previous stage.

    index: number of the block in the model.
    """

    TENSOR_PARALLEL: ClassVar = {"norm1": "norm", "norm2": "norm"}

    def __init__(self, config: SwinConfig, index: int) -> None:
        stage = config.stage_of(index)
        super().__init__(index, config.depth, stage.width, drop_path=config.drop_path)
        before = config.stages[stage.number - 2] if stage.merges(index) else None
        self.downsample = PatchMerging(config, before) if before else None
        self.norm1 = LayerNorm(stage.width, eps=config.norm_eps)
        self.attn = WindowAttention(stage, stage.shift(index))
        self.norm2 = LayerNorm(stage.width, eps=config.norm_eps)
        self.mlp = MLP(stage.width, stage.mlp_hidden_dim)

    def reset_buffers(self) -> None:
        super().reset_buffers()
        self.attn.reset_buffers()

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """x: [batch, tokens, width]. keys: int64 [batch] or None (nothing is dropped)."""
        keys = keys if self.training else None
        x = x if self.downsample is None else self.downsample(x)
        x = x + self.branch(self.attn(self.norm1(x)), keys, 0)
        return x + self.branch(self.mlp(self.norm2(x)), keys, 1)


class Head(Layer):
    """Head layer: tokens [batch, tokens, width] -> logits [batch, classes]. Norm, mean over tokens, classifier."""

    TENSOR_PARALLEL: ClassVar = {"norm": "norm", "pooled": "pooled", "fc": "classifier"}
    TENSOR_MODES = MODES

    def __init__(self, config: SwinConfig) -> None:
        super().__init__()
        width = config.features
        self.norm = LayerNorm(width, eps=config.norm_eps)
        self.pooled = nn.Identity()  # a place for collectives
        self.fc = nn.Linear(width, config.num_classes)
        self.divisible = {"classifier feature": width}

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, tokens, width] -> [batch, classes]."""
        return self.fc(self.pooled(self.norm(x).mean(dim=1)))


build_block = Block


SCHEMES: dict[str, Rules] = {
    # timm's trunc_normal_ cuts at ±2, which is 100 deviations here: it cuts nothing off.
    "timm": (
        ("*norm*.weight", constant(1.0)),
        ("*norm*.bias", constant(0.0)),
        ("embed.patch_embed.proj.*", patch_convolution),
        ("*.bias", constant(0.0)),
        ("*", normal(0.02)),
    ),
    # Biases by relative position as large as the scores, so that mistakes in them show.
    "perturbed": (
        ("*norm*.weight", normal(0.1, mean=1.0)),
        ("*.relative_position_bias_table", normal(0.5)),
        ("*.bias", normal(0.05)),
        ("*.weight", lecun_normal),
    ),
}
"""The rules of each scheme; the first pattern that matches a parameter's name decides."""
