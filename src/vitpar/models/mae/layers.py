"""Layers of a masked autoencoder: embed, blocks of the encoder, the decoder's embedding, blocks of the decoder, head.

Without keys, as in evaluation, every sample has the key 0: the same patches are visible in all images.
"""

from typing import ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn

from vitpar.models.description import MODES, block_index
from vitpar.models.layers import Layer, LayerNorm, for_every_sample
from vitpar.models.mae.config import MAEConfig
from vitpar.models.mae.masking import shuffled
from vitpar.models.text_layers import TokenLogits
from vitpar.models.vit.layers import Block, PatchEmbed


def positions_of(grid: int, width: int) -> Tensor:
    """Return the fixed 2-D sine-cosine positions of a grid of patches, float32 [grid², width].

    Frequencies are those of the authors' code, which differ a little from ``vitpar.models.vit.layers.sincos_2d``.
    """
    y, x = torch.meshgrid(torch.arange(grid).double(), torch.arange(grid).double(), indexing="ij")
    omega = 10000.0 ** (-torch.arange(width // 4).double() / (width / 4))
    y, x = y.flatten()[:, None] * omega, x.flatten()[:, None] * omega
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1).float()


def positions_with_class(config: MAEConfig, width: int) -> Tensor:
    """Return the positions of class token and patches as other libraries store them, [1, 1 + patches, width]."""
    positions = positions_of(config.image_size // config.patch_size, width)
    return torch.cat([positions.new_zeros(1, width), positions])[None]


def _keys(keys: Tensor | None, x: Tensor) -> Tensor:
    return torch.zeros(len(x), dtype=torch.int64, device=x.device) if keys is None else keys


class _Positions(Layer):
    """Base of layers that add fixed positions.

    width: features of a token.
    """

    TENSOR_MODES = MODES
    positions: Tensor

    def __init__(self, grid: int, width: int) -> None:
        super().__init__()
        self.grid, self.width, self.first_feature = grid, width, 0
        self.register_buffer("positions", torch.empty(1, grid**2, width), persistent=False)

    def take_features(self, index: int, parts: int) -> None:
        self.first_feature = index * self.width // parts
        self.register_buffer("positions", self.positions.chunk(parts, dim=-1)[index].clone(), persistent=False)

    def reset_buffers(self) -> None:
        whole = positions_of(self.grid, self.width)[None]
        self.positions.copy_(whole.narrow(-1, self.first_feature, self.positions.shape[-1]))


class Embed(_Positions):
    """Embedding layer: images [batch, channels, height, width] -> class token and visible patches.

    The result is [batch, 1 + visible, width]. Masked patches are not embedded.
    """

    TENSOR_PARALLEL: ClassVar = {"cls_token": "token"}

    def __init__(self, config: MAEConfig) -> None:
        c = config
        super().__init__(c.image_size // c.patch_size, c.embed_dim)
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


class MaskEmbed(_Positions):
    """Last norm of the encoder, and embedding layer of the decoder.

    Tokens [batch, 1 + visible, width] -> [batch, 1 + patches, the decoder's width]: a mask token stands in the place of
    each patch that the encoder did not see.
    """

    TENSOR_PARALLEL: ClassVar = {"norm": "norm", "proj": "merge", "mask_token": "token"}

    def __init__(self, config: MAEConfig) -> None:
        c = config
        super().__init__(c.image_size // c.patch_size, c.decoder_embed_dim)
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


def build_layer(config: MAEConfig, name: str) -> Layer:
    """Return the layer called `name`."""
    if name in ("embed", "head"):
        return Embed(config) if name == "embed" else Head(config)
    if name == config.dec_embed:
        return MaskEmbed(config)
    index = block_index(name)
    encodes = index < config.depth
    return Block(config.encoder if encodes else config.decoder, index if encodes else index - config.depth - 1)
