"""The shape of a Swin Transformer and the names it goes by.

Names and sizes are timm's (arXiv 2103.14030); the two of huge are Galvatron's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

from vitpar.errors import ModelError
from vitpar.limits import MAX_IMAGE_SIZE, MAX_WIDTH
from vitpar.models.bases import check_fields, check_tokens
from vitpar.models.config import ModelConfig
from vitpar.models.description import ExtraPasses, block_index, is_block
from vitpar.text import either, shown


def _sizes(embed_dim: int, depths: tuple[int, ...], first_heads: int) -> dict[str, Any]:
    heads = tuple(first_heads * 2**stage for stage in range(len(depths)))
    return {"embed_dim": embed_dim, "depths": depths, "num_heads": heads}


_NAME = re.compile("(swin_[a-z0-9]{1,9})_patch([0-9]{1,9})_window([0-9]{1,9})_([0-9]{1,9})")
SIZES: dict[str, dict[str, Any]] = {
    "swin_nano": _sizes(32, (2, 2, 2), 2),  # ours: small enough for a laptop's processes
    "swin_tiny": _sizes(96, (2, 2, 6, 2), 3),
    "swin_small": _sizes(96, (2, 2, 18, 2), 3),
    "swin_base": _sizes(128, (2, 2, 18, 2), 4),
    "swin_large": _sizes(192, (2, 2, 18, 2), 6),
    "swin_huge": _sizes(320, (2, 2, 26, 2), 8),
    "swin_huge48": _sizes(320, (2, 2, 42, 2), 8),
}
SHIPPED = (
    *(f"swin_{size}_patch4_window7_224" for size in ("tiny", "small", "base", "large", "huge", "huge48")),
    *(f"swin_{size}_patch4_window12_384" for size in ("base", "large")),
)
"""Names that stand for a published model; any other patch, window and image size that fits is a name too."""


@dataclass(frozen=True)
class SwinStage:
    """Blocks that compute tokens of the same number and width."""

    number: int
    """Number of the stage, from 1."""
    blocks: range
    """Numbers of its blocks in the model."""
    width: int
    """Features of a token."""
    num_heads: int
    """Attention heads of a block."""
    mlp_hidden_dim: int
    """Hidden features of a block's MLP."""
    grid: int
    """Tokens along a side of the image."""
    window: int
    """Tokens along a side of a window: the model's window size, or `grid` if that is smaller."""

    @property
    def head_dim(self) -> int:
        """Return the features of one attention head."""
        return self.width // self.num_heads

    @property
    def windows(self) -> int:
        """Return the number of windows."""
        return (self.grid // self.window) ** 2

    def merges(self, block: int) -> bool:
        """Return whether the block with this number in the model begins by merging patches."""
        return self.number > 1 and block == self.blocks.start

    def shift(self, block: int) -> int:
        """Return by how many tokens the block's windows are shifted: half a window in every other block, else 0."""
        odd = (block - self.blocks.start) % 2
        return self.window // 2 if odd and self.grid > self.window else 0


@dataclass(frozen=True, repr=False)
class SwinConfig(ModelConfig):
    """Architecture of a Swin Transformer."""

    FAMILY: ClassVar[str] = "swin"
    NEEDED: ClassVar[tuple[str, ...]] = ("patch_size", "embed_dim", "depths", "num_heads")
    PUBLISHED: ClassVar[tuple[str, ...]] = SHIPPED

    name: str
    """timm's model name or swin_custom; only messages use it."""
    patch_size: int
    """Side of a patch, in pixels."""
    embed_dim: int
    """Features of a token in the first stage; each further stage has twice as many."""
    depths: tuple[int, ...]
    """Number of blocks of each stage."""
    num_heads: tuple[int, ...]
    """Attention heads of a block, for each stage; each divides the width of its stage."""
    window_size: int = 7
    """Side of a window, in tokens. A stage with fewer tokens along a side has one window of all its tokens."""
    mlp_ratio: float = 4.0
    """Hidden features of a block's MLP, as a multiple of the stage's width, rounded down."""
    image_size: int = 224
    """Side of the square input image, in pixels."""
    num_classes: int = 1000
    """Outputs of the classifier."""
    channels: int = 3
    """Channels of an input image."""
    norm_eps: float = 1e-5
    """Epsilon of every LayerNorm."""
    drop_path: float = 0.0
    """Stochastic depth rate of the last block; it rises linearly from 0 over the blocks of all stages."""
    init: Literal["timm", "perturbed"] = "timm"
    """Scheme of initial values, timm's ``weight_init`` (docs/models.md). "perturbed" is for tests: no gradient starts
    at zero."""

    def __post_init__(self) -> None:
        name = shown(self.name)
        for field in ("depths", "num_heads"):
            if not isinstance(value := getattr(self, field), list | tuple) or not value:
                raise ModelError(f"{field} of {name} is {shown(value)}: list one number for each stage")
            object.__setattr__(self, field, tuple(value))  # a list in a recipe
        check_fields(self)
        self._check_stages(name)
        self._check_grid(name)
        check_tokens(self, self.stages[0].grid ** 2, "use larger patches or smaller images")

    def _check_stages(self, name: str) -> None:
        for stage, depth in enumerate(self.depths):
            if depth < 1:
                raise ModelError(f"stage {stage + 1} of {name} has {shown(depth)} blocks: it must have 1 or more")
        if len(self.depths) != len(self.num_heads):
            raise ModelError(
                f"depths of {name} are {len(self.depths)} but num_heads are {len(self.num_heads)}: "
                "list one of each for each stage"
            )
        if not 0 < self.mlp_ratio <= MAX_WIDTH:
            raise ModelError(f"mlp_ratio of {name} is {shown(self.mlp_ratio)}: it must be above 0")
        for stage, heads in enumerate(self.num_heads):
            width = self.embed_dim * 2**stage
            if width > MAX_WIDTH:
                raise ModelError(
                    f"stage {stage + 1} of {name} has width {width}, above {MAX_WIDTH:,}: use fewer stages or a "
                    "smaller embed_dim"
                )
            if width % heads:
                raise ModelError(
                    f"{heads} heads do not divide the width {width} of stage {stage + 1} of {name}: change num_heads "
                    "or embed_dim"
                )
            if not 1 <= (hidden := int(width * self.mlp_ratio)) <= MAX_WIDTH:
                raise ModelError(
                    f"stage {stage + 1} of {name} has {hidden} hidden features: change mlp_ratio so that it has from "
                    f"1 to {MAX_WIDTH:,}"
                )

    def _check_grid(self, name: str) -> None:
        """Raise ModelError if patches cannot be merged in pairs, or windows do not tile the tokens of a stage."""
        grid, window = self.image_size // self.patch_size, self.window_size
        for stage in range(1, len(self.depths) + 1):
            if grid > window and grid % window:
                raise ModelError(
                    f"windows of {window}x{window} do not tile the {grid}x{grid} tokens of stage {stage} of {name}: "
                    f"use an image size of {either(self._sizes_that_fit())}, or another window_size"
                )
            if stage < len(self.depths):
                if grid % 2:
                    raise ModelError(
                        f"stage {stage} of {name} has {grid}x{grid} tokens, which cannot be merged two by two: use an "
                        f"image size of {either(self._sizes_that_fit())}, or fewer stages"
                    )
                grid //= 2

    def _sizes_that_fit(self) -> list[int]:
        """Return the nearest smaller and larger image sizes that merging and windows allow."""
        stages, window = len(self.depths), self.window_size
        unit = self.patch_size * 2 ** (stages - 1)  # pixels of a token of the last stage

        def fits(tokens: int) -> bool:
            grids = [tokens * 2**stage for stage in range(stages)]
            return all(grid <= window or grid % window == 0 for grid in grids)

        near, most = self.image_size // unit, max(1, MAX_IMAGE_SIZE // unit)
        below = next((n for n in range(min(near, most), 0, -1) if fits(n)), None)
        above = next((n for n in range(near + 1, most + 1) if fits(n)), None)
        return [n * unit for n in (below, above) if n is not None] or [window * unit]

    @cached_property
    def stages(self) -> tuple[SwinStage, ...]:
        """Stages in order."""
        grid, first, stages = self.image_size // self.patch_size, 0, list[SwinStage]()
        for i, (depth, heads) in enumerate(zip(self.depths, self.num_heads, strict=True)):
            width, side = self.embed_dim * 2**i, grid // 2**i
            blocks = range(first, first := first + depth)
            hidden, window = int(width * self.mlp_ratio), min(self.window_size, side)
            stages.append(SwinStage(i + 1, blocks, width, heads, hidden, side, window))
        return tuple(stages)

    def stage_of(self, block: int) -> SwinStage:
        """Return the stage that has the block with this number in the model."""
        return next(stage for stage in self.stages if block in stage.blocks)

    @property
    def depth(self) -> int:
        """Number of blocks of all stages."""
        return sum(self.depths)

    @property
    def features(self) -> int:
        """Features that the classifier reads."""
        return self.stages[-1].width

    @classmethod
    def fields_of(cls, name: str) -> Mapping[str, Any] | None:
        match = _NAME.fullmatch(name)
        if match is None or match[1] not in SIZES:
            return None
        numbers = zip(("patch_size", "window_size", "image_size"), map(int, match.groups()[1:]), strict=True)
        return SIZES[match[1]] | dict(numbers)

    def kind_of(self, name: str) -> tuple[str, str | None]:
        if not is_block(name):
            return super().kind_of(name)
        stage = self.stage_of(index := block_index(name))
        return f"{'merge' if stage.merges(index) else 'stage'}{stage.number}", f"stage{stage.number}"

    def extra_passes(self, plain: Collection[str], whole: bool) -> ExtraPasses:
        # Counted: no difference but the bias of fc1, which the estimate subtracts for every family that was counted.
        return (), ()
