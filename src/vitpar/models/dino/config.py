"""Configuration of a Vision Transformer that trains itself on several crops of an image (DINOv2, arXiv 2304.07193)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Self

from vitpar.errors import ModelError
from vitpar.limits import MAX_TOKENS, MAX_WIDTH
from vitpar.models.config import ModelConfig
from vitpar.models.description import Adapted, ExtraPasses, InputSpec, MadeTensor, SideInput
from vitpar.models.vit.config import ViTConfig
from vitpar.text import shown

PREFIX = "dino_"
"""Beginning of a name. What follows is the name of the Vision Transformer."""
GLOBAL = 2
"""Global crops of an image."""


@dataclass(frozen=True)
class Crops:
    """Crops of one size."""

    count: int
    """Number of crops."""
    size: int
    """Side of a crop, in pixels."""
    tokens: int
    """Tokens of a crop."""


@dataclass(frozen=True, repr=False)
class DINOConfig(ViTConfig):
    """Architecture of a Vision Transformer with the heads of DINOv2.

    The row of an image is the tokens of all its crops, one crop after another: two global crops of `image_size` pixels,
    then the local crops. Its outputs are scores of `num_classes` prototypes: of the class token of each crop, and of
    the masked patches of the global crops, in `slots` places for each crop; then the features of the class tokens of
    the global crops, in the first columns.
    """

    FAMILY: ClassVar[str] = "dino"
    PUBLISHED: ClassVar[tuple[str, ...]] = ()
    TASK: ClassVar[str] = "dino"
    CALIBRATED: ClassVar[bool] = False

    num_classes: int = 65_536
    """Prototypes of each head."""
    local_crops: int = 8
    """Local crops of an image."""
    local_size: int = 96
    """Side of a local crop, in pixels; a multiple of `patch_size`."""
    head_hidden_dim: int = 2_048
    """Hidden features of the heads."""
    head_bottleneck_dim: int = 256
    """Features that prototypes are compared with."""
    patch_head: bool = False
    """Whether masked patches have a head of their own, instead of that of the class tokens."""
    teacher: bool = False
    """Whether it takes the global crops only, without masks: the teacher."""

    def __post_init__(self) -> None:
        super().__post_init__()
        name = shown(self.name)
        most = {"local_crops": 64, "head_hidden_dim": MAX_WIDTH, "head_bottleneck_dim": MAX_WIDTH}
        for field, largest in most.items():
            if not (field != "local_crops") <= (value := getattr(self, field)) <= largest:
                raise ModelError(f"{field} of {name} is {shown(value)}: it must be at most {largest:,}, and above 0")
        if self.local_crops and (self.local_size < 1 or self.local_size % self.patch_size):
            raise ModelError(
                f"local_size of {name} is {shown(self.local_size)}: it must be a multiple of patch_size "
                f"{self.patch_size}"
            )
        if self.pool != "cls" or self.distillation or self.representation_size is not None or self.dropout:
            raise ModelError(
                f"{name} needs pool 'cls', without distillation token, representation layer and dropout: leave them out"
            )
        if self.parallel_blocks:
            raise ModelError(f"{name} has parallel blocks, which do not know crops: set parallel_blocks to false")
        if self.tokens > MAX_TOKENS:
            raise ModelError(f"all crops of {name} have {self.tokens:,} tokens, above {MAX_TOKENS:,}: use fewer crops")

    @cached_property
    def backbone(self) -> ViTConfig:
        """Vision Transformer that takes one global crop, with a classifier of one class."""
        known = {field.name: getattr(self, field.name) for field in fields(ViTConfig)}
        return ViTConfig(**{**known, "name": self.name.removeprefix(PREFIX), "num_classes": 1})

    @property
    def crops(self) -> tuple[Crops, ...]:
        """Crops of an image by size, the global ones first."""
        counts = [(GLOBAL, self.image_size)]
        if self.local_crops and not self.teacher:
            counts.append((self.local_crops, self.local_size))
        return tuple(Crops(count, size, self.prefix_tokens + (size // self.patch_size) ** 2) for count, size in counts)

    @property
    def tokens(self) -> int:
        return sum(crops.count * crops.tokens for crops in self.crops)

    @property
    def positions(self) -> int:
        return self.backbone.positions

    @property
    def slots(self) -> int:
        """Places for the masked patches of a global crop: half of its patches."""
        return max(1, self.patches // 2)

    @property
    def packs_attention(self) -> bool:
        return False  # its kernels compute attention between all tokens of a row

    @property
    def input(self) -> InputSpec:
        return InputSpec((self.channels, sum(crops.count * crops.size**2 for crops in self.crops)))

    @property
    def side_inputs(self) -> Mapping[str, SideInput]:
        return {"masks": SideInput((GLOBAL, self.patches), "bool")}

    @property
    def output_shape(self) -> tuple[int, ...]:
        class_tokens = sum(crops.count for crops in self.crops)
        return class_tokens + GLOBAL * self.slots + GLOBAL, self.num_classes

    @property
    def words(self) -> tuple[str, str]:
        crops = " and ".join(f"{crops.count} of {crops.size} pixels" for crops in self.crops)
        return f"crops of images, {crops}", f"{self.num_classes:,} prototypes"

    @property
    def pretrained(self) -> tuple[ModelConfig, Mapping[str, MadeTensor]]:
        names = [name for name in self.backbone.shapes if not name.startswith("head.")]
        return self.backbone, {name: MadeTensor((name,)) for name in [*names, "head.norm.weight", "head.norm.bias"]}

    def layers_above(self, parameter: str) -> int:
        return 0 if parameter.startswith("head.norm.") else super().layers_above(parameter)

    def rate_part(self, parameter: str) -> str:
        if parameter.startswith("embed.patch_embed."):
            return "patch_embed"
        if parameter.startswith("head.") and not parameter.startswith("head.norm."):
            return "prototypes" if ".fc." in parameter or ".lengths." in parameter else "heads"
        return "backbone"

    def clip_part(self, parameter: str) -> str:
        return next(
            (head for head in ("class_head", "patch_head") if parameter.startswith(f"head.{head}.")), "backbone"
        )

    def adapted(self, there: ModelConfig) -> Adapted | None:
        if type(there) is not ViTConfig:
            return None
        backbone = {field.name: getattr(there, field.name) for field in fields(ViTConfig)}
        made = replace(self, **{**backbone, "name": self.name, "num_classes": self.num_classes})
        kept = tuple(name for name in self.shapes if name not in there.shapes)
        return Adapted(made, {}, "the heads and the mask token are new", kept)

    def resized(self, image_size: int) -> Self | None:
        return None

    @property
    def of_teacher(self) -> Self:
        """The configuration of the teacher, which has the same parameters."""
        return replace(self, teacher=True)

    @classmethod
    def continuing(cls, config: ModelConfig) -> Self | None:
        """Return the model that continues to train a ViT, or None. Raises ModelError without a class token."""
        return cls.around(config) if type(config) is ViTConfig else None

    @classmethod
    def around(cls, backbone: ViTConfig) -> Self:
        """Return the model with a backbone. Raises ModelError for one without a class token."""
        known = {field.name: getattr(backbone, field.name) for field in fields(ViTConfig)}
        # 96 of 224 pixels, in whole patches.
        size = max(1, round(backbone.image_size * 3 / 7 / backbone.patch_size)) * backbone.patch_size
        return cls(**{**known, "name": f"{PREFIX}{backbone.name}", "num_classes": 1, "local_size": size})

    @classmethod
    def knows(cls, name: str) -> bool:
        return name.startswith(PREFIX) and ViTConfig.knows(name.removeprefix(PREFIX))

    @classmethod
    def named(cls, name: str, options: Mapping[str, Any]) -> Self:
        own = {field.name for field in fields(cls)} - {field.name for field in fields(ViTConfig)}
        shared = {key: value for key, value in options.items() if key not in own and key != "num_classes"}
        plain = cls.around(ViTConfig.named(name.removeprefix(PREFIX), shared))
        own_options = {key: value for key, value in options.items() if key not in shared}
        changed: dict[str, Any] = {"num_classes": cls.num_classes, **own_options}
        return replace(plain, **changed)

    def extra_passes(self, plain: Collection[str], whole: bool) -> ExtraPasses:
        return (), ()  # not counted

    @property
    def tiny(self) -> Self:
        return self
