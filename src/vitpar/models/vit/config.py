"""Configuration of a Vision Transformer."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from vitpar.errors import ModelError
from vitpar.limits import MAX_MEASURE
from vitpar.models.bases import check_fields, check_tokens
from vitpar.models.config import GATED, ModelConfig, late_module
from vitpar.models.description import Adapted, ExtraPasses, MadeTensor
from vitpar.models.vit import published
from vitpar.text import shown


@dataclass(frozen=True, repr=False)
class ViTConfig(ModelConfig):
    """Architecture of a Vision Transformer."""

    FAMILY: ClassVar[str] = "vit"
    NEEDED: ClassVar[tuple[str, ...]] = ("patch_size", "embed_dim", "depth", "num_heads")
    PUBLISHED: ClassVar[tuple[str, ...]] = published.PUBLISHED
    CALIBRATED: ClassVar[bool] = True

    name: str
    """timm's model name or vit_custom; only messages use it."""
    patch_size: int
    """Side of a patch, in pixels."""
    embed_dim: int
    """Features of a token."""
    depth: int
    """Number of blocks."""
    num_heads: int
    """Attention heads of a block; divides `embed_dim`."""
    mlp_hidden_dim: int
    """Hidden features of a block's MLP."""
    image_size: int = 224
    """Side of the square input image, in pixels; a multiple of `patch_size`."""
    num_classes: int = 1000
    """Outputs of the classifier."""
    channels: int = 3
    """Channels of an input image."""
    pool: Literal["cls", "avg", "map"] = "cls"
    """Input of the classifier: the class token, the mean of the patch tokens, or what a learned query gets from all
    tokens by attention, with an MLP after it (SigLIP's). Only for the first is there a class token."""
    num_reg_tokens: int = 0
    """Register tokens: learned tokens that are dropped before the classifier (arXiv 2309.16588)."""
    distillation: bool = False
    """Add DeiT's distillation token with its own classifier; logits are the mean of both (arXiv 2012.12877)."""
    representation_size: int | None = None
    """Features of a Linear + tanh before the classifier; None for no such layer."""
    position: Literal["learned", "sincos2d", "none"] = "learned"
    """Position embedding that is added to the tokens: learned, fixed sines and cosines on patch tokens only, or none.
    """
    prefix_positions: bool = True
    """Whether learned positions are also added to the tokens before the patches."""
    rope: Literal["none", "axial", "dinov3"] = "none"
    """Rotation of queries and keys of patch tokens by their positions (arXiv 2104.09864): by row and column, with
    neighbouring features in pairs (EVA-02, arXiv 2303.11331), or by coordinates from -1 to 1, with the halves of the
    features in pairs (DINOv3, arXiv 2508.10104)."""
    rope_temperature: float = 10000.0
    """Ratio of the longest to the shortest period of the rotation; 100 in DINOv3."""
    rope_grid: int | None = None
    """Side of a grid of patches to which rows and columns are scaled under rope "axial"; None does not scale them."""
    rope_register_temperature: float | None = None
    """Rotate register tokens too, as a square grid of their own with this ratio of periods (ViT-5); None does not."""
    norm: Literal["layer", "rms"] = "layer"
    """Norm everywhere: LayerNorm, or RMSNorm (arXiv 1910.07467)."""
    qk_norm: bool = False
    """Apply the norm to queries and keys in each head."""
    attn_norm: bool = False
    """Apply the norm to the outputs of all heads, before the projection."""
    mlp_norm: bool = False
    """Apply the norm to the hidden features of the MLP."""
    fc_norm: bool = False
    """Whether the last norm comes after the mean over tokens, instead of before."""
    norm_eps: float = 1e-6
    """Epsilon of every norm (1e-6 in timm, 1e-12 in transformers)."""
    qkv_bias: Literal["all", "qv", "none"] = "all"
    """Which of queries, keys and values have biases."""
    activation: Literal["gelu", "gelu_tanh", "swiglu", "geglu"] = "gelu"
    """Activation of the MLP. gelu_tanh approximates GELU. swiglu and geglu multiply half of the features by a function
    of the other half; `mlp_hidden_dim` counts the products."""
    parallel_blocks: bool = False
    """Compute attention and MLP of a block side by side, from one norm and in one pair of linear layers
    (arXiv 2302.05442)."""
    layer_scale: float | None = None
    """Initial value of the learned scale of each residual branch; None for no scale (arXiv 2103.17239)."""
    drop_path: float = 0.0
    """Stochastic depth rate of the last block; it rises linearly from 0 over the blocks."""
    dropout: float = 0.0
    """Dropout rate after positions, attention projection and MLP."""
    init: Literal["jax", "timm", "moco", "perturbed"] = "jax"
    """Scheme of initial values, timm's ``weight_init`` (docs/models.md). "perturbed" is for tests: no gradient starts
    at zero."""

    def __post_init__(self) -> None:
        name = shown(self.name)
        check_fields(self)
        if self.position == "sincos2d" and self.embed_dim % 4:
            raise ModelError(f"embed_dim of {name} is {self.embed_dim}: 2-D sincos positions need a multiple of 4")
        if self.distillation and self.pool != "cls":
            raise ModelError(f"the distillation token of {name} needs pool 'cls', not '{self.pool}'")
        if self.num_reg_tokens < 0:
            raise ModelError(f"num_reg_tokens of {name} is {shown(self.num_reg_tokens)}: it must be 0 or more")
        self._check_parts(name)
        check_tokens(self, self.tokens, "use larger patches, smaller images or fewer register tokens")

    def _check_parts(self, name: str) -> None:
        """Raise ModelError for parts that contradict each other. name: of the model, for messages."""
        if self.fc_norm and self.pool != "avg":
            raise ModelError(f"fc_norm of {name} needs pool 'avg', not '{self.pool}': set fc_norm to false")
        if self.rope != "none" and self.head_dim % 4:
            raise ModelError(
                f"heads of {name} have {self.head_dim} features: rotary positions need a multiple of 4, so change "
                "embed_dim or num_heads"
            )
        if self.rope != "axial" and self.rope_grid is not None:
            raise ModelError(f"rope_grid of {name} needs rope 'axial', not '{self.rope}': leave one of the two out")
        if self.rope == "none" and self.rope_temperature != type(self).rope_temperature:
            raise ModelError(f"rope_temperature of {name} needs rope: set it, or leave this out")
        if self.prefix_positions is False and self.position != "learned":
            raise ModelError(
                f"prefix_positions of {name} needs position 'learned', not '{self.position}': set prefix_positions to "
                "true"
            )
        if self.rope_register_temperature is not None:
            if self.rope == "none":
                raise ModelError(f"rope_register_temperature of {name} needs rope: set it, or leave this out")
            if math.isqrt(self.num_reg_tokens) ** 2 != self.num_reg_tokens:
                raise ModelError(
                    f"{self.num_reg_tokens} register tokens of {name} form no square to rotate: use 4 or 9, or leave "
                    "rope_register_temperature out"
                )
        for field in ("rope_temperature", "rope_register_temperature"):
            if (value := getattr(self, field)) is not None and not 1 < value <= MAX_MEASURE:
                raise ModelError(f"{field} of {name} is {shown(value)}: it must be above 1 and at most {MAX_MEASURE:g}")
        if self.parallel_blocks and self.mlp_hidden_dim % self.num_heads:
            raise ModelError(
                f"{self.num_heads} heads do not divide mlp_hidden_dim {self.mlp_hidden_dim} of {name}, which parallel "
                "blocks need: change one of the two"
            )
        if self.parallel_blocks and (self.mlp_norm or self.attn_norm):
            raise ModelError(f"{name} has parallel blocks, which have no mlp_norm or attn_norm: leave these out")

    @property
    def patches(self) -> int:
        """Patch tokens of an image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def prefix_tokens(self) -> int:
        """Class, distillation and register tokens, which stand before the patches in that order."""
        return (self.pool == "cls") + self.distillation + self.num_reg_tokens

    @property
    def tokens(self) -> int:
        """Tokens of an image inside the blocks."""
        return self.prefix_tokens + self.patches

    @property
    def positions(self) -> int:
        """Learned positions of an image."""
        if self.position != "learned":
            return 0
        return self.tokens if self.prefix_positions else self.patches

    @property
    def gates(self) -> int:
        """Features that the first linear layer of an MLP gives for each hidden one: 2 with gates, else 1."""
        return 2 if self.activation in GATED else 1

    @property
    def head_dim(self) -> int:
        """Features of one attention head."""
        return self.embed_dim // self.num_heads

    @property
    def packs_attention(self) -> bool:
        """Whether attention takes queries, keys and values as one linear layer gives them."""
        return self.qkv_bias != "qv" and not self.qk_norm and self.rope == "none"

    @classmethod
    def fields_of(cls, name: str) -> Mapping[str, Any] | None:
        return published.fields_of(name)

    @classmethod
    def completed(cls, known: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        hidden = {"mlp_hidden_dim": 4 * options["embed_dim"]} if "embed_dim" in options else {}
        return {**known, **hidden, **options}

    def layers_above(self, parameter: str) -> int:
        # timm's groups have a norm after the mean in the head, and one before it in the last block.
        return 0 if self.fc_norm and parameter.startswith("head.norm.") else super().layers_above(parameter)

    @property
    def large(self) -> bool:
        return self.embed_dim > 768 or self.depth > 12

    def extra_passes(self, plain: Collection[str], whole: bool) -> ExtraPasses:
        # Not counted: parallel blocks, what gates cost, and that norms of queries and keys cost 5 passes more with
        # rotary positions or separate biases. `experiments/dry_bench.py` counts.
        if self.parallel_blocks:
            return (), ()
        scales, drops, packs = self.layer_scale is not None, self.drop_path > 0, whole and self.qkv_bias == "all"
        # As ``Block._ends_in_products`` of the model.
        ends_in_products = {"attn.proj", "mlp.fc2"} <= {*plain} and not scales and not self.dropout
        stream = (
            (True, -1, -1),  # the sum after attention is kept for backward
            (ends_in_products, -2, -2),  # fc2 adds to the residual; the biases of proj and fc2 are summed by the norms
            (scales, 0, 7),  # the gradients of layer scale
            (drops, 0, 2 if scales else 4),  # drop-path
            (self.dropout > 0, 0.5, 4),  # dropout
        )
        heads = (
            # The kernel that packs the gradients sums the bias, if there is one.
            (packs or self.qkv_bias != "all", 0, -3),
            (self.qkv_bias == "qv", 4, 2),  # biases of queries and values are added after the product
            (self.rope != "none", 8, 0 if packs else 6),  # rotary positions
            (self.qk_norm, 8, 7),  # norms of queries and keys
        )
        return stream, heads

    def adapted(self, there: ModelConfig) -> Adapted | None:
        # So masked autoencoders are fine-tuned (arXiv 2111.06377). With `fc_norm` a new norm normalises the means.
        if not isinstance(there, ViTConfig) or there.distillation or (there.pool, self.pool) != ("cls", "avg"):
            return None
        if self.num_reg_tokens != there.num_reg_tokens + 1:
            return None
        names = ("embed.cls_token", *(["embed.reg_token"] if there.num_reg_tokens else []))
        made = replace(there, pool="avg", num_reg_tokens=self.num_reg_tokens, fc_norm=self.fc_norm)
        kept = ("head.norm.weight", "head.norm.bias") if self.fc_norm else ()
        change = "the class token becomes a register, and tokens are averaged"
        registers = MadeTensor(names, lambda *tokens: late_module("torch").cat(tokens, 1))
        return Adapted(made, {"embed.reg_token": registers}, change, kept)

    def resized(self, image_size: int) -> Self | None:
        return replace(self, image_size=image_size) if self.rope == "none" else None

    @property
    def tiny(self) -> Self:
        return replace(self, embed_dim=8 * self.num_heads, mlp_hidden_dim=16 * self.num_heads)
