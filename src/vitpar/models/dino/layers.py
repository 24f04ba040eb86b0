"""Layers of a Vision Transformer for several crops of an image: embed, blocks.0 … blocks.L-1, head."""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vitpar.errors import ModelError
from vitpar.models.dino.config import GLOBAL, Crops, DINOConfig
from vitpar.models.initial import Rules, constant, normal
from vitpar.models.keyed_random import at_place, keeps_sample
from vitpar.models.layers import NORMS, Layer, for_every_sample
from vitpar.models.text_layers import TokenLogits
from vitpar.models.vit import layers as vit
from vitpar.models.vit.attention import Attention, rope_tables
from vitpar.sharded import to_local


def of_crops(x: Tensor, crops: tuple[Crops, ...], dim: int = 1) -> Iterator[Tensor]:
    """Yield the part of each size of crops: [batch · crops, …] of [batch, …], whose dimension `dim` has all tokens."""
    start = 0
    for one in crops:
        count, tokens = one.count, one.tokens
        part = x.narrow(dim, start, count * tokens).unflatten(dim, (count, tokens))
        yield part.movedim(dim, 1).flatten(0, 1)
        start += count * tokens


class Embed(vit.Embed):
    """Embedding layer: crops [batch, channels, pixels] -> tokens of all crops [batch, tokens, width].

    A mask token stands in the place of masked patches of the global crops, before positions are added.
    """

    TENSOR_PARALLEL: ClassVar = {**vit.Embed.TENSOR_PARALLEL, "mask_token": "token"}
    TENSOR_MODES: ClassVar[tuple[str, ...]] = ("1d", "sp")

    def __init__(self, config: DINOConfig) -> None:
        super().__init__(config.backbone)
        self.crops, self.masks = config.crops, not config.teacher
        self.mask_token = nn.Parameter(torch.empty(1, 1, config.embed_dim))

    def forward(self, images: Tensor, masks: Tensor) -> Tensor:  # type: ignore[override]
        """Return the tokens of all crops.

        images: the pixels of one crop after another, normalised.
        masks: whether patches are masked, bool [batch, 2, patches of a global crop].
        """
        parts, start = [], 0
        for number, crops in enumerate(self.crops):
            count, size = crops.count, crops.size
            pixels = images.narrow(2, start, count * size**2)
            start += count * size**2
            x = self.patch_embed(rearrange(pixels, "b c (n h w) -> (b n) c h w", n=count, h=size, w=size))
            if number == 0:
                token = for_every_sample(self.mask_token)
                # The teacher's token gets no gradient, but is a parameter as the student's.
                x = torch.where(masks.flatten(0, 1)[..., None] & self.masks, token.to(x.dtype), x)
            parts.append(self.tokens_of(x).view(len(images), count * crops.tokens, -1))
        return torch.cat(parts, dim=1)


class CropAttention(Attention):
    """Attention between the tokens of each crop."""

    def __init__(self, config: DINOConfig) -> None:
        super().__init__(config)
        self.crops = config.crops
        # As many windows of equal size as compute at most as much, for prices: the rest is counted apart.
        pairs = sum(crops.count * crops.tokens**2 for crops in config.crops)
        self.attention_shape = replace(self.attention_shape, windows=-(-(config.tokens**2) // pairs))

    def fill_tables(self) -> None:
        if self.config.rope != "none":
            assert isinstance(self.config, DINOConfig)
            backbone, tables = self.config.backbone, []
            for crops in self.crops:
                tables += [torch.stack(rope_tables(replace(backbone, image_size=crops.size)))] * crops.count
            for buffer, table in zip((self.cosines, self.sines), torch.cat(tables, dim=1), strict=True):
                buffer.copy_(table)

    def attend_heads(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = []
        for crops, *three in zip(self.crops, *(of_crops(x, self.crops, dim=2) for x in (q, k, v)), strict=True):
            y = F.scaled_dot_product_attention(*three)
            parts.append(rearrange(y, "(b n) h s d -> b (n s) (h d)", n=crops.count))
        return torch.cat(parts, dim=1)


class Block(vit.Block):
    """Block whose attention and stochastic depth are those of each crop: [batch, tokens, width] -> the same shape.

    All blocks have one rate of stochastic depth, as in DINOv2.
    """

    TENSOR_MODES: ClassVar[tuple[str, ...]] = ("1d", "sp")

    def __init__(self, config: DINOConfig, index: int) -> None:
        super().__init__(config, index)
        self.attn = CropAttention(config)
        self.crops, self.drop_path_rate = config.crops, config.drop_path

    def branch(self, x: Tensor, keys: Tensor | None, number: int, scale: nn.Module | None = None) -> Tensor:
        x = x if scale is None else scale(x)
        factors = self.path_scale(keys, number, x.dtype)
        return x if factors is None else x * factors

    def path_scale(self, keys: Tensor | None, number: int, dtype: torch.dtype) -> Tensor | None:
        """Return the factors of branch `number` by stochastic depth, of `dtype` [batch, tokens, 1]; None for 1."""
        if keys is None or not self.drops_paths:
            return None
        here, parts, first = self._path_keys(keys, number), [], 0
        for crops in self.crops:
            count, tokens = crops.count, crops.tokens
            numbers = torch.arange(first, first + count, device=keys.device)
            of_crop = at_place(here[:, None], numbers << _CROP_BITS).flatten()
            parts.append(keeps_sample(of_crop, self.rate).view(-1, count).repeat_interleave(tokens, dim=1))
            first += count
        return (torch.cat(parts, dim=1).to(dtype) / (1.0 - self.rate).to(dtype))[..., None]


_CROP_BITS = 20
"""Place of the number of a crop in the places of random numbers, above those of all blocks."""


class Lengths(nn.Module):
    """Learned lengths of prototypes.

    upstream: in a separate backward for weights, a parameter that is used once must come after one that is used before
    it and beside it, or torch computes the gradient of the latter twice (``get_param_groups``). A module keeps the
    order; parameters of the head itself would come first.
    """

    def __init__(self, prototypes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(prototypes))
        self.divisible = {"prototype": prototypes}


class PrototypeHead(nn.Module):
    """Head of DINOv2: an MLP of three layers, then the scores of prototypes of learned lengths.

    Features have length 1 before they are multiplied by the prototypes, whose directions and lengths are learned apart.
    """

    TENSOR_PARALLEL: ClassVar = {"fc": "vocabulary_output", "lengths": "per_head"}

    def __init__(self, config: DINOConfig) -> None:
        super().__init__()
        hidden, bottleneck = config.head_hidden_dim, config.head_bottleneck_dim
        self.mlp1 = nn.Linear(config.embed_dim, hidden)
        self.mlp2 = nn.Linear(hidden, hidden)
        self.mlp3 = nn.Linear(hidden, bottleneck)
        self.fc = TokenLogits(bottleneck, config.num_classes, bias=False)
        self.lengths = Lengths(config.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, tokens, width] -> [batch, tokens, this rank's prototypes]."""
        x = self.mlp3(F.gelu(self.mlp2(F.gelu(self.mlp1(x)))))
        x = F.normalize(x, dim=-1, eps=1e-12 if x.dtype is not torch.float16 else 1e-6)
        return self.fc(x) * (to_local(self.lengths.weight) / to_local(self.fc.weight).norm(dim=1))


class Head(Layer):
    """Heads: tokens [batch, tokens, width] -> scores and features as `DINOConfig` says, [batch, rows, prototypes]."""

    TENSOR_PARALLEL: ClassVar = {"norm": "norm", "gathered": "gathered"}

    def __init__(self, config: DINOConfig) -> None:
        super().__init__()
        self.crops, self.slots, self.prefix_tokens = config.crops, config.slots, config.prefix_tokens
        self.norm = NORMS[config.norm](config.embed_dim, eps=config.norm_eps)
        self.gathered = nn.Identity()  # a place for collectives
        self.class_head = PrototypeHead(config)
        self.patch_head = PrototypeHead(config) if config.patch_head else None

    def forward(self, x: Tensor, masks: Tensor) -> Tensor:
        """x: [batch, tokens, width]. masks: bool [batch, 2, patches of a global crop]."""
        batch = len(x)
        classes, patches = [], None
        for part, crops in zip(of_crops(x, self.crops), self.crops, strict=True):
            classes.append(part[:, 0].view(batch, crops.count, -1))
            patches = part[:, self.prefix_tokens :] if patches is None else patches
        assert patches is not None, "there are global crops"
        # Masked patches come first, in their order; what fills the places behind them does not count.
        order = masks.flatten(0, 1).logical_not().byte().argsort(dim=1, stable=True)[:, : self.slots, None]
        chosen = patches.gather(1, order.expand(-1, -1, patches.shape[2]))
        of_classes = self.norm(torch.cat(classes, dim=1))
        of_patches = self.norm(chosen).view(batch, GLOBAL * self.slots, -1)
        if self.patch_head is None:
            scores = [self.class_head(torch.cat([of_classes, of_patches], dim=1))]
        else:
            scores = [self.class_head(of_classes), self.patch_head(of_patches)]
        features = self.gathered(of_classes[:, :GLOBAL])
        columns = scores[0].shape[2] - features.shape[2]
        if columns < 0:
            raise ModelError(
                f"a rank has {scores[0].shape[2]:,} prototypes, fewer than the {features.shape[2]:,} features of a "
                "token: use a smaller tp, or a larger task.options.prototypes"
            )
        return torch.cat([*scores, F.pad(features, (0, columns))], dim=1)


build_block = Block


_HEADS: Rules = (
    ("head.*.lengths.weight", constant(1.0)),
    ("head.*.mlp*.bias", constant(0.0)),
    ("head.*.weight", normal(0.02)),
    ("embed.mask_token", constant(0.0)),
)
_NORM: Rules = (("head.norm.weight", constant(1.0)), ("head.norm.bias", constant(0.0)))
_PERTURBED: Rules = (("head.*.lengths.weight", normal(0.1, mean=1.0)),)
SCHEMES: dict[str, Rules] = {
    scheme: (*_NORM, *_HEADS, *rules) if scheme != "perturbed" else (*_PERTURBED, *rules)
    for scheme, rules in vit.SCHEMES.items()
}
"""The rules of each scheme; the first pattern that matches a parameter's name decides."""
