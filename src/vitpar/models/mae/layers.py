"""Layers of a masked autoencoder: embed, blocks of the encoder, the decoder's embedding, blocks of the decoder, head.

Without keys, as in evaluation, every sample has the key 0: the same patches are visible in all images.
"""

import functools
from typing import ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn

from vitpar.models.description import MODES
from vitpar.models.initial import Rules, constant, lecun_normal, normal, xavier_uniform
from vitpar.models.keyed_random import at_place, keyed_uniform
from vitpar.models.layers import Layer, LayerNorm, for_every_sample
from vitpar.models.mae.config import MAEConfig
from vitpar.models.text_layers import TokenLogits
from vitpar.models.vit.layers import Block, PatchEmbed, Positioned, sincos_2d

PLACE = -1
"""Place of the choice of visible patches among the uses of random numbers in the model (`at_place`)."""
POSITIONS = functools.partial(sincos_2d, of_mae=True)


def masking_noise(keys: Tensor, patches: int) -> Tensor:
    """Return a random number of each patch, float32 [batch, patches]; the patches with the smallest stay visible.

    keys: int64 [batch], those of the samples: the choice is the same under every plan, and when a run resumes.
    """
    return keyed_uniform(at_place(keys, torch.full_like(keys, PLACE)), [patches])


def shuffled(keys: Tensor, patches: int) -> Tensor:
    """Return the patches in random order, int64 [batch, patches]. The first ones are visible. keys: int64 [batch]."""
    return masking_noise(keys, patches).argsort(dim=1, stable=True)


def masked(keys: Tensor, patches: int, visible: int) -> Tensor:
    """Return whether each patch is masked, bool [batch, patches]. keys: int64 [batch]."""
    return shuffled(keys, patches).argsort(dim=1) >= visible


def positions_with_class(config: MAEConfig, width: int) -> Tensor:
    """Return the positions of class token and patches as other libraries store them, [1, 1 + patches, width]."""
    grid = config.image_size // config.patch_size
    positions = POSITIONS(grid, grid, width)
    return torch.cat([positions.new_zeros(1, width), positions])[None]


def _keys(keys: Tensor | None, x: Tensor) -> Tensor:
    return torch.zeros(len(x), dtype=torch.int64, device=x.device) if keys is None else keys


class Embed(Positioned):
    """Embedding layer: images [batch, channels, height, width] -> class token and visible patches.

    The result is [batch, 1 + visible, width]. Masked patches are not embedded.
    """

    TENSOR_PARALLEL: ClassVar = {"cls_token": "token"}

    def __init__(self, config: MAEConfig) -> None:
        c = config
        super().__init__(c.image_size // c.patch_size, c.embed_dim, POSITIONS)
        self.visible = c.visible
        self.patch_embed = PatchEmbed(c.encoder)
        self.cls_token = nn.Parameter(torch.empty(1, 1, c.embed_dim))

    def forward(self, images: Tensor, keys: Tensor | None = None) -> Tensor:
        """images: [batch, channels, size, size], normalised. keys: int64 [batch] or None (key 0)."""
        p = self.patch_embed.patch_size
        patches = rearrange(images, "b c (h p) (w q) -> b (h w) (c p q)", p=p, q=p)
        chosen = shuffled(_keys(keys, images), patches.shape[1])[:, : self.visible]
        x = self.patch_embed.proj(patches.gather(1, chosen[..., None].expand(-1, -1, patches.shape[2])))
        x = x + self.positions[0].to(x.dtype)[chosen]
        return torch.cat([for_every_sample(self.cls_token).expand(x.shape[0], -1, -1), x], dim=1)


class MaskEmbed(Positioned):
    """Last norm of the encoder, and embedding layer of the decoder.

    Tokens [batch, 1 + visible, width] -> [batch, 1 + patches, the decoder's width]: a mask token stands in the place of
    each patch that the encoder did not see.
    """

    TENSOR_PARALLEL: ClassVar = {"norm": "norm", "proj": "merge", "mask_token": "token"}

    def __init__(self, config: MAEConfig) -> None:
        c = config
        super().__init__(c.image_size // c.patch_size, c.decoder_embed_dim, POSITIONS)
        self.norm = LayerNorm(c.embed_dim, eps=c.norm_eps)
        self.proj = nn.Linear(c.embed_dim, c.decoder_embed_dim)
        self.mask_token = nn.Parameter(torch.empty(1, 1, c.decoder_embed_dim))
        self.divisible = {"incoming feature": c.embed_dim, "outgoing feature": c.decoder_embed_dim}

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """x: [batch, 1 + visible, width]. keys: int64 [batch] or None (key 0)."""
        patches = self.positions.shape[1]
        restored = shuffled(_keys(keys, x), patches).argsort(dim=1)
        x = self.proj(self.norm(x))
        masks = for_every_sample(self.mask_token).expand(x.shape[0], patches + 1 - x.shape[1], -1)
        every = torch.cat([x[:, 1:], masks], dim=1)
        every = every.gather(1, restored[..., None].expand_as(every)) + self.positions.to(x.dtype)
        return torch.cat([x[:, :1], every], dim=1)


class Head(Layer):
    """Output layer: tokens [batch, 1 + patches, width] -> pixels of each patch [batch, patches, p · p · channels].

    The values of a patch are ordered (row, column, channel).
    """

    TENSOR_PARALLEL: ClassVar = {"norm": "norm", "gathered": "gathered", "fc": "classifier"}
    TENSOR_MODES = MODES

    def __init__(self, config: MAEConfig) -> None:
        super().__init__()
        c = config
        self.norm = LayerNorm(c.decoder_embed_dim, eps=c.norm_eps)
        self.gathered = nn.Identity()  # a place for collectives
        self.fc = TokenLogits(c.decoder_embed_dim, c.patch_values)
        self.divisible = {"classifier feature": c.decoder_embed_dim}

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 1 + patches, width] -> [batch, patches, p · p · channels]."""
        return self.fc(self.gathered(self.norm(x[:, 1:])))


def build_block(config: MAEConfig, index: int) -> Layer:
    """Return a block by its number in the model."""
    if index == config.depth:
        return MaskEmbed(config)
    encodes = index < config.depth
    return Block(config.encoder if encodes else config.decoder, index if encodes else index - config.depth - 1)


SCHEMES: dict[str, Rules] = {
    "mae": (
        ("*norm*.weight", constant(1.0)),
        ("*.bias", constant(0.0)),
        ("*_token", normal(0.02)),
        ("*", xavier_uniform()),
    ),
    "perturbed": (
        ("*norm*.weight", normal(0.1, mean=1.0)),
        ("*_token", normal(0.05)),
        ("*bias", normal(0.05)),
        ("*", lecun_normal),
    ),
}
"""The rules of each scheme; the first pattern that matches a parameter's name decides."""
