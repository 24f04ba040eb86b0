"""Bases of the configurations of families: what fields may be, models of text, and those of encoder and decoder."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from vitpar.errors import ModelError
from vitpar.limits import MAX_BLOCKS, MAX_CHANNELS, MAX_CLASSES, MAX_IMAGE_SIZE, MAX_TOKENS, MAX_WIDTH
from vitpar.models.config import ModelConfig, field_names
from vitpar.models.description import InputSpec, SideInput, block_index, block_name, is_block
from vitpar.text import nearest, shown

LOSS_CHUNK = 2**23
"""Most logits whose exponentials the loss has in float32 at once (``vitpar.parallel.vocabulary``): 32 MiB."""
_WIDTHS = ("embed_dim", "num_heads", "head_dim", "mlp_hidden_dim", "representation_size", "num_buckets")
LARGEST = {
    **dict.fromkeys((*_WIDTHS, "decoder_embed_dim", "decoder_num_heads", "decoder_mlp_hidden_dim"), MAX_WIDTH),
    **dict.fromkeys(("depth", "decoder_depth"), MAX_BLOCKS),
    **dict.fromkeys(("image_size", "patch_size", "window_size"), MAX_IMAGE_SIZE),
    **dict.fromkeys(("num_classes", "vocab_size", "token_types"), MAX_CLASSES),
    **dict.fromkeys(("tokens", "decoder_tokens", "positions", "max_distance"), MAX_TOKENS),
    "channels": MAX_CHANNELS,
}
"""Largest value of a field, in any family that has it."""


@cache
def _words_of(config: Any) -> dict[str, tuple[str, ...]]:
    """Return the words that a field may have, for each Literal."""
    return {name: get_args(kind) for name, kind in get_type_hints(config).items() if get_origin(kind) is Literal}


def check_ranges(config: ModelConfig) -> None:
    """Raise ModelError if a number of `config` is out of the range of LARGEST."""
    name = shown(config.name)
    checked = field_names(type(config)) | {"depth"}  # Swin's is computed
    for field, most in LARGEST.items():
        given = getattr(config, field, None) if field in checked else None
        for number in given if isinstance(given, tuple) else (given,):
            if number is not None and not 1 <= number <= most:
                raise ModelError(f"{field} of {name} is {shown(number)}: it must be from 1 to {most:,}")
    if (patch := getattr(config, "patch_size", None)) and config.image_size % patch:
        near = max(1, round(config.image_size / patch)) * patch
        raise ModelError(
            f"patches of {patch} pixels do not tile images of {config.image_size} for {name}: "
            f"use an image size of {near} or another patch size"
        )
    if not 0.0 < (eps := getattr(config, "norm_eps", 1.0)) <= 1.0:
        raise ModelError(f"norm_eps of {name} is {shown(eps)}: it must be above 0 and at most 1")
    for field in ("drop_path", "dropout"):
        if not 0.0 <= (rate := getattr(config, field, 0.0)) < 1.0:
            raise ModelError(f"{field} of {name} is {shown(rate)}: it must be at least 0 and below 1")


def check_fields(config: ModelConfig) -> None:
    """Raise ModelError if a number of `config` is out of its range, a word is unknown, or heads do not divide."""
    check_ranges(config)
    name = shown(config.name)
    for field, words in _words_of(type(config)).items():  # type: ignore[arg-type]
        if (value := getattr(config, field)) not in words:
            raise ModelError(
                f"unknown {field} '{shown(value)}' of {name}{nearest(value, words)}: use {' or '.join(words)}"
            )
    for start in ("", "decoder_"):
        width, heads = (getattr(config, f"{start}{field}", 0) for field in ("embed_dim", "num_heads"))
        divided = isinstance(heads, int) and heads and "head_dim" not in field_names(type(config))
        if divided and width % heads:
            raise ModelError(f"{heads} heads do not divide {start}embed_dim {width} of {name}: change one of the two")


def check_tokens(config: ModelConfig, tokens: int, fix: str) -> None:
    """Raise ModelError if `tokens` of an image are too many. fix: what to do about it."""
    if tokens > MAX_TOKENS:
        raise ModelError(f"images of {config.name} have {shown(tokens)} tokens, above {MAX_TOKENS:,}: {fix}")


class TextConfig(ModelConfig):
    """Model that takes token ids [batch, tokens] and gives logits [batch, tokens, vocabulary].

    Subclasses have the fields `vocab_size` and `tokens`.
    """

    image_size: ClassVar[int] = 0  # type: ignore[misc]
    """There are no images."""
    channels: ClassVar[int] = 0  # type: ignore[misc]
    """There are no images."""

    vocab_size: int
    """Number of token ids."""
    tokens: int
    """Tokens of a sample that enter the model."""

    @property
    def num_classes(self) -> int:  # type: ignore[override]
        """Logits of each token: the size of the vocabulary."""
        return self.vocab_size

    @property
    def input(self) -> InputSpec:
        return InputSpec((self.tokens,), "int64")


def padding_mask(tokens: int) -> SideInput:
    """Return a mask that is true, or not 0, for tokens to attend to. Without it, all are."""
    return SideInput((tokens,), "bool", optional=True)


class EncoderDecoder(ModelConfig):
    """Model of `depth` blocks of an encoder, a layer `dec_embed` between, and `decoder_depth` blocks of a decoder."""

    depth: int
    """Number of blocks of the encoder."""
    decoder_depth: int
    """Number of blocks of the decoder."""

    @property
    def dec_embed(self) -> str:
        """Name of the layer that makes the first tokens of the decoder."""
        return block_name(self.depth)

    @property
    def num_blocks(self) -> int:
        return self.depth + 1 + self.decoder_depth

    def kind_of(self, name: str) -> tuple[str, str | None]:
        if not is_block(name):
            return super().kind_of(name)
        kind = "dec_embed" if name == self.dec_embed else "encoder" if block_index(name) < self.depth else "decoder"
        return kind, kind
