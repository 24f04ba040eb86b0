"""The shape of a Vision Transformer and the names it goes by, without importing torch (planning needs no tensors).

Names and sizes are timm's; the widths of giant, gigantic and 22B are those of "Scaling Vision Transformers"
(arXiv 2106.04560) and "Scaling Vision Transformers to 22 Billion Parameters" (arXiv 2302.05442).
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vitpar.errors import ModelError
from vitpar.limits import MAX_BLOCKS, MAX_CHANNELS, MAX_CLASSES, MAX_IMAGE_SIZE, MAX_TOKENS, MAX_WIDTH
from vitpar.text import nearest, shown

_LARGEST = {
    "patch_size": MAX_IMAGE_SIZE,
    "width": MAX_WIDTH,
    "depth": MAX_BLOCKS,
    "heads": MAX_WIDTH,
    "hidden": MAX_WIDTH,
    "image_size": MAX_IMAGE_SIZE,
    "num_classes": MAX_CLASSES,
    "channels": MAX_CHANNELS,
    "representation_size": MAX_WIDTH,
}
_KNOWN = {
    "pool": ("cls", "avg"),
    "position": ("learned", "sincos2d"),
    "init": ("jax", "timm", "moco", "perturbed"),
}
IGNORED = -1
"""Label of a sample that counts for nothing: padding, or an image that could not be read."""


@dataclass(frozen=True)
class ViTConfig:
    """Everything that decides a ViT's parameters and its forward function.

    name: what error messages call it. image_size, patch_size: pixels. width: features of a token. hidden: features
    inside the MLP.
    pool: "cls" reads the class token, "avg" the mean of the patch tokens (no class token then).
    registers: extra learned tokens that are dropped at the end (arXiv 2309.16588).
    distillation: DeiT's second token with a classifier of its own; logits are the mean of the two (arXiv 2012.12877).
    representation_size: features of a Linear + tanh before the classifier, None for none.
    position: "learned", or "sincos2d" (fixed, patch tokens only). qk_norm: LayerNorm of queries and keys per head.
    norm_eps: what every LayerNorm adds to the variance (1e-6 in timm, 1e-12 in transformers).
    layer_scale: initial value of the residual scales, None for none (arXiv 2103.17239).
    init: scheme of initial values, timm's ``weight_init`` (docs/models.md): "jax", "timm" (timm's default) or "moco";
    "perturbed" for tests: nothing starts where gradients vanish.
    drop_path: rate of the last block, rising linearly from 0. dropout: after positions, attention projection and MLP.
    """

    name: str
    patch_size: int
    width: int
    depth: int
    heads: int
    hidden: int
    image_size: int = 224
    num_classes: int = 1000
    channels: int = 3
    pool: Literal["cls", "avg"] = "cls"
    registers: int = 0
    distillation: bool = False
    representation_size: int | None = None
    position: Literal["learned", "sincos2d"] = "learned"
    qk_norm: bool = False
    norm_eps: float = 1e-6
    layer_scale: float | None = None
    drop_path: float = 0.0
    dropout: float = 0.0
    init: Literal["jax", "timm", "moco", "perturbed"] = "jax"

    def __post_init__(self) -> None:
        name = shown(self.name)
        for field, most in _LARGEST.items():
            if (number := getattr(self, field)) is not None and not 1 <= number <= most:
                raise ModelError(f"{field} of {name} is {shown(number)}: it must be from 1 to {most:,}")
        if self.image_size % self.patch_size:
            near = max(1, round(self.image_size / self.patch_size)) * self.patch_size
            raise ModelError(
                f"patches of {self.patch_size} pixels do not tile images of {self.image_size} for {name}: "
                f"use an image size of {near} or another patch size"
            )
        for field, known in _KNOWN.items():
            if (value := getattr(self, field)) not in known:
                raise ModelError(
                    f"unknown {field} '{shown(value)}' of {name}{nearest(value, known)}: use {' or '.join(known)}"
                )
        if self.width % self.heads:
            raise ModelError(
                f"{self.heads} heads do not divide the width {self.width} of {name}: change one of the two"
            )
        if self.position == "sincos2d" and self.width % 4:
            raise ModelError(f"2-D sincos positions need a width that 4 divides, {name} has {self.width}: change it")
        if self.distillation and self.pool != "cls":
            raise ModelError(f"the distillation token of {name} needs pool 'cls', not '{self.pool}'")
        if self.registers < 0:
            raise ModelError(f"registers of {name} is {shown(self.registers)}: it must be 0 or more")
        if self.tokens > MAX_TOKENS:
            raise ModelError(
                f"images of {name} have {shown(self.tokens)} tokens, above {MAX_TOKENS:,}: use larger patches, smaller "
                "images or fewer registers"
            )
        if not 0.0 < self.norm_eps <= 1.0:
            raise ModelError(f"norm_eps of {name} is {shown(self.norm_eps)}: it must be above 0 and at most 1")
        for field in ("drop_path", "dropout"):
            if not 0.0 <= (rate := getattr(self, field)) < 1.0:
                raise ModelError(f"{field} of {name} is {shown(rate)}: it must be at least 0 and below 1")

    @property
    def patches(self) -> int:
        """Patch tokens of an image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def prefix_tokens(self) -> int:
        """Class, distillation and register tokens, which stand before the patches in that order."""
        return (self.pool == "cls") + self.distillation + self.registers

    @property
    def tokens(self) -> int:
        """Tokens of an image inside the blocks."""
        return self.prefix_tokens + self.patches

    @property
    def features(self) -> int:
        """Features that the classifier reads."""
        return self.representation_size or self.width

    @property
    def head_dim(self) -> int:
        """Features of one attention head."""
        return self.width // self.heads

    @property
    def stochastic(self) -> bool:
        """Whether training draws random numbers inside the model."""
        return self.drop_path > 0 or self.dropout > 0

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The layers in order: stem, blocks.0 …, head."""
        return ("stem", *(f"blocks.{i}" for i in range(self.depth)), "head")

    @property
    def layer_flops(self) -> dict[str, int]:
        """Floating-point operations of one image's training step (forward × 3) by layer, matrix products only."""
        s, d = self.tokens, self.width
        block = 6 * (s * (4 * d * d + 2 * d * self.hidden) + 2 * s * s * d)
        features = self.representation_size or d
        head = 6 * (features * self.num_classes * (1 + self.distillation) + d * (self.representation_size or 0))
        stem = 6 * self.patches * self.channels * self.patch_size**2 * d
        return {"stem": stem, **{f"blocks.{i}": block for i in range(self.depth)}, "head": head}

    @property
    def flops(self) -> int:
        """Floating-point operations of one image's training step."""
        return sum(self.layer_flops.values())


FIELDS = frozenset(field.name for field in dataclasses.fields(ViTConfig))


def config_from_json(said: Mapping[str, Any]) -> ViTConfig:
    """Return the configuration whose fields are `said`. Raises ModelError for values that JSON has otherwise, too."""
    from pydantic import TypeAdapter, ValidationError

    if unknown := said.keys() - FIELDS:
        raise ModelError(f"it says '{shown(min(unknown))}', which no model has")
    try:
        return TypeAdapter(ViTConfig).validate_json(json.dumps(said), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        if first["type"] == "value_error":  # a sentence of ours
            raise ModelError(str(first["ctx"]["error"])) from None
        place = ".".join(map(str, first["loc"]))
        raise ModelError(f"{place}{': ' * bool(place)}{shown(first['msg'])}") from None


def _sizes(width: int, depth: int, heads: int, hidden: int | None = None, **options: Any) -> dict[str, Any]:
    return {"width": width, "depth": depth, "heads": heads, "hidden": hidden or 4 * width, **options}


FAMILIES: dict[str, dict[str, Any]] = {
    "vit_nano": _sizes(96, 8, 12),  # ours: small enough for a laptop's processes, divisible enough for most plans
    "vit_tiny": _sizes(192, 12, 3),
    "vit_small": _sizes(384, 12, 6),
    "vit_base": _sizes(768, 12, 12),
    "vit_large": _sizes(1024, 24, 16),
    "vit_huge": _sizes(1280, 32, 16),
    "vit_giant": _sizes(1408, 40, 16, 6144),
    "vit_gigantic": _sizes(1664, 48, 16, 8192),
    # Sequential blocks with biases; the paper's run attention and MLP side by side.
    "vit_22b": _sizes(6144, 48, 48, qk_norm=True),
    "deit_tiny_distilled": _sizes(192, 12, 3, distillation=True),
    "deit_small_distilled": _sizes(384, 12, 6, distillation=True),
    "deit_base_distilled": _sizes(768, 12, 12, distillation=True),
}
SHIPPED = (
    *(
        f"{family}_patch{patch}_224"
        for family in ("vit_tiny", "vit_small", "vit_base", "vit_large")
        for patch in (16, 32)
    ),
    "vit_base_patch8_224",
    "vit_large_patch14_224",
    *(f"{family}_patch14_224" for family in ("vit_huge", "vit_giant", "vit_gigantic", "vit_22b")),
    *(f"deit_{size}_distilled_patch16_224" for size in ("tiny", "small", "base")),
)
"""Names that stand for a published model; any other patch and image size of a family is a name too."""


def model_config(name: str, **options: Any) -> ViTConfig:
    """The configuration of a model by timm's name, e.g. ``vit_small_patch16_224``, with `options` replacing its fields.

    Any family takes any patch and image size: ``vit_tiny_patch4_32``. The name ``vit_custom`` takes everything from
    `options`.

    Raises ModelError for an unknown name or option, or options that contradict each other.
    """
    known = FIELDS - {"name"}
    for option in options:
        if option not in known:
            raise ModelError(
                f"unknown model option '{shown(option)}'{nearest(option, known)}: options are "
                f"{', '.join(sorted(known))}"
            )
    if name == "vit_custom":
        missing = {"patch_size", "width", "depth", "heads"} - set(options)
        if missing:
            raise ModelError(
                f"vit_custom needs the model option{'s' * (len(missing) > 1)} {', '.join(sorted(missing))}"
            )
        return ViTConfig(name=name, **{"hidden": 4 * options["width"], **options})
    family, _, sizes = name.partition("_patch")
    patch, _, image = sizes.partition("_")
    if family not in FAMILIES or not all(re.fullmatch("[0-9]{1,9}", size) for size in (patch, image)):
        raise ModelError(
            f"unknown model '{shown(name)}'{nearest(name, SHIPPED)}: use a name such as vit_small_patch16_224, or "
            "vit_custom"
        )
    fields = {**FAMILIES[family], "patch_size": int(patch), "image_size": int(image), **options}
    if "width" in options and "hidden" not in options:
        fields["hidden"] = 4 * options["width"]
    return ViTConfig(name=name, **fields)
