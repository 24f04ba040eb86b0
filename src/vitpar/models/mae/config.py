"""Configuration of a masked autoencoder and the names it goes by.

Sizes are those of arXiv 2111.06377 and its code (github.com/facebookresearch/mae).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

from vitpar.errors import ModelError
from vitpar.models.bases import EncoderDecoder, check_fields, check_tokens
from vitpar.models.config import ModelConfig, late_module
from vitpar.models.description import MadeTensor
from vitpar.models.vit.config import ViTConfig
from vitpar.text import shown

SIZES: dict[str, dict[str, Any]] = {
    "base": {"patch_size": 16, "embed_dim": 768, "depth": 12, "num_heads": 12},
    "large": {"patch_size": 16, "embed_dim": 1024, "depth": 24, "num_heads": 16},
    "huge": {"patch_size": 14, "embed_dim": 1280, "depth": 32, "num_heads": 16},
}
"""Sizes of the encoder by the end of a name."""
_NAME = re.compile(r"mae_vit_(base|large|huge)(?:_patch([1-9][0-9]{0,4}))?(?:_([1-9][0-9]{0,4}))?")


@dataclass(frozen=True, repr=False)
class MAEConfig(EncoderDecoder):
    """Architecture of a masked autoencoder.

    Its blocks are `depth` blocks of the encoder, which see a class token and the visible patches; `dec_embed`, which
    puts mask tokens in the places of the others; and `decoder_depth` blocks of the decoder.
    """

    FAMILY: ClassVar[str] = "mae"
    NEEDED: ClassVar[tuple[str, ...]] = ("patch_size", "embed_dim", "depth", "num_heads")
    PUBLISHED: ClassVar[tuple[str, ...]] = tuple(f"mae_vit_{size}" for size in SIZES)
    TASK: ClassVar[str] = "mae"

    name: str
    """Name of the model; only messages use it."""
    patch_size: int
    """Side of a patch, in pixels."""
    embed_dim: int
    """Features of a token in the encoder."""
    depth: int
    """Number of blocks of the encoder."""
    num_heads: int
    """Attention heads of a block of the encoder; divides `embed_dim`."""
    mlp_hidden_dim: int
    """Hidden features of the MLP of a block of the encoder."""
    image_size: int = 224
    """Side of the square input image, in pixels; a multiple of `patch_size`."""
    channels: int = 3
    """Channels of an input image."""
    decoder_embed_dim: int = 512
    """Features of a token in the decoder."""
    decoder_depth: int = 8
    """Number of blocks of the decoder."""
    decoder_num_heads: int = 16
    """Attention heads of a block of the decoder; divides `decoder_embed_dim`."""
    decoder_mlp_hidden_dim: int = 2048
    """Hidden features of the MLP of a block of the decoder; by default four times `decoder_embed_dim`."""
    mask_ratio: float = 0.75
    """Share of the patches that are masked. Of n patches, int(n · (1 - mask_ratio)) stay visible."""
    norm_eps: float = 1e-6
    """Epsilon of every LayerNorm (1e-12 in transformers)."""
    init: Literal["mae", "perturbed"] = "mae"
    """Scheme of initial values, that of the authors' code. "perturbed" is for tests: no gradient starts at zero."""

    def __post_init__(self) -> None:
        name = shown(self.name)
        check_fields(self)
        for start in ("", "decoder_"):
            if (width := getattr(self, f"{start}embed_dim")) % 4:
                raise ModelError(f"{start}embed_dim of {name} is {width}: 2-D sincos positions need a multiple of 4")
        if not 0.0 < self.mask_ratio < 1.0 or not 0 < self.visible < self.patches:
            raise ModelError(
                f"mask_ratio of {name} is {shown(self.mask_ratio)}: it must leave at least one of the {self.patches} "
                "patches visible and mask at least one"
            )
        check_tokens(self, self.patches + 1, "use larger patches or smaller images")

    @property
    def patches(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def visible(self) -> int:
        """Patches that the encoder sees."""
        return int(self.patches * (1 - self.mask_ratio))  # rounded as in the authors' code

    @property
    def patch_values(self) -> int:
        """Pixels of a patch times channels: outputs for each patch."""
        return self.channels * self.patch_size**2

    @property
    def num_classes(self) -> int:  # type: ignore[override]
        """Outputs for each patch."""
        return self.patch_values

    @property
    def output_shape(self) -> tuple[int, ...]:
        return self.patches, self.patch_values

    @property
    def stochastic(self) -> bool:
        """Whether training draws random numbers inside the model: the visible patches."""
        return True

    @property
    def pretrained(self) -> tuple[ModelConfig, Mapping[str, MadeTensor]]:
        # Without a classifier; fixed positions become learned.
        layers = late_module("vitpar.models.mae.layers")
        made = {name: MadeTensor((name,)) for name in self.encoder.shapes}
        made["embed.pos_embed"] = MadeTensor((), lambda: layers.positions_with_class(self, self.embed_dim))
        made |= {f"head.norm.{end}": MadeTensor((f"{self.dec_embed}.norm.{end}",)) for end in ("weight", "bias")}
        return self.encoder, {name: tensor for name, tensor in made.items() if not name.startswith("head.fc.")}

    @cached_property
    def encoder(self) -> ViTConfig:
        """Vision Transformer with the encoder's blocks and a classifier of one class; its positions are learned."""
        known = _NAME.fullmatch(self.name)
        name = f"vit_{known[1]}_patch{self.patch_size}_{self.image_size}" if known else "vit_custom"
        return ViTConfig(
            *(name, self.patch_size, self.embed_dim, self.depth, self.num_heads, self.mlp_hidden_dim),
            image_size=self.image_size,
            num_classes=1,
            channels=self.channels,
            norm_eps=self.norm_eps,
        )

    @cached_property
    def decoder(self) -> ViTConfig:
        """Vision Transformer with the decoder's blocks."""
        return replace(
            self.encoder,
            embed_dim=self.decoder_embed_dim,
            depth=self.decoder_depth,
            num_heads=self.decoder_num_heads,
            mlp_hidden_dim=self.decoder_mlp_hidden_dim,
        )

    @classmethod
    def fields_of(cls, name: str) -> Mapping[str, Any] | None:
        if (match := _NAME.fullmatch(name)) is None:
            return None
        given = zip(("patch_size", "image_size"), match.groups()[1:], strict=True)
        return SIZES[match[1]] | {field: int(number) for field, number in given if number}

    @classmethod
    def completed(cls, known: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        fields = {**known, **options}
        if not known:  # a decoder in proportion to the encoder
            sizes = {"decoder_embed_dim": fields["embed_dim"], "decoder_num_heads": fields["num_heads"]}
            fields = {**sizes, "decoder_depth": max(1, min(cls.decoder_depth, fields["depth"] // 3)), **fields}
        fields.setdefault("mlp_hidden_dim", 4 * fields["embed_dim"])
        fields.setdefault("decoder_mlp_hidden_dim", 4 * fields.get("decoder_embed_dim", cls.decoder_embed_dim))
        return fields

    @property
    def large(self) -> bool:
        return self.embed_dim > 768 or self.depth > 12

    @property
    def tiny(self) -> Self:
        heads, decoding = self.num_heads, self.decoder_num_heads
        return replace(
            self,
            embed_dim=8 * heads,
            mlp_hidden_dim=16 * heads,
            decoder_embed_dim=8 * decoding,
            decoder_mlp_hidden_dim=16 * decoding,
        )
