"""Conversion of a masked autoencoder's parameters from the authors' code, transformers and vitpar's own format.

- **mae**: ``models_mae.py`` of github.com/facebookresearch/mae. Names of the encoder are timm's.
- **transformers**: ``ViTMAEForPreTraining`` (4 and 5).

Blocks of both differ from vitpar's as those of a Vision Transformer do (``vitpar.models.vit.foreign``), and blocks of
the decoder have numbers of their own. Positions are fixed: vitpar computes them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from vitpar.errors import DataError, ModelError
from vitpar.models.families import model_config
from vitpar.models.foreign import ImportHints, MappedParameter, Patterns, Renamed, Shapes, dimension, format_of, mapped
from vitpar.models.mae.config import MAEConfig
from vitpar.models.vit import foreign as vit
from vitpar.models.vit.config import ViTConfig
from vitpar.models.vit.foreign_names import FORMATS as OF_VIT

_END = r"(\.weight|\.bias)"
_DECODER = "dec_embed"
"""Begin of the names of the layer that completes the tokens, until its number is known."""
OTHERS: dict[str, Patterns] = {
    "mae": (
        (rf"norm{_END}", rf"{_DECODER}.norm\1"),
        (rf"decoder_embed{_END}", rf"{_DECODER}.proj\1"),
        (r"mask_token", rf"{_DECODER}.mask_token"),
        (rf"decoder_norm{_END}", r"head.norm\1"),
        (rf"decoder_pred{_END}", r"head.fc\1"),
    ),
    "transformers": (
        (rf"vit\.layernorm{_END}", rf"{_DECODER}.norm\1"),
        (rf"decoder\.decoder_embed{_END}", rf"{_DECODER}.proj\1"),
        (r"decoder\.mask_token", rf"{_DECODER}.mask_token"),
        (rf"decoder\.decoder_norm{_END}", r"head.norm\1"),
        (rf"decoder\.decoder_pred{_END}", r"head.fc\1"),
    ),
}
"""Patterns of names that Vision Transformers lack, or mean otherwise, by format."""
# upstream: transformers 5.23 saves decoder_layers.0 as decoder_encoder.layer.0, a mistake of its conversion.
BLOCKS = {"mae": r"decoder_(?=blocks\.)", "transformers": r"decoder\.decoder_(?=layers\.|encoder\.layer\.)"}
"""Begin of the names of the decoder's blocks, by format; the rest is as in a Vision Transformer."""
LIKE = {"mae": "timm", "transformers": "transformers"}
"""Format of a Vision Transformer whose blocks have the same names, by format."""
MARKS = {
    "vitpar": r"blocks\.\d{1,4}\.mask_token",
    "mae": r"decoder_pred\.weight",
    "transformers": r"decoder\.decoder_pred\.weight",
}
"""Name that identifies the family and the format."""
_POSITIONS = re.compile(r"(?:vit\.embeddings\.position_embeddings|(?:decoder\.)?(?:decoder_)?pos_embed)")
_COMPARED = (
    *("patch_size", "embed_dim", "depth", "num_heads", "mlp_hidden_dim"),
    *("decoder_embed_dim", "decoder_depth", "decoder_num_heads", "decoder_mlp_hidden_dim"),
)


class MAEHints(ImportHints, Protocol):
    """Settings of masked autoencoders from the files next to the tensors, or None."""

    @property
    def heads(self) -> int | None:
        """Number of attention heads of the encoder."""

    @property
    def decoder(self) -> Mapping[str, Any]:
        """Number of attention heads of the decoder and share of masked patches, by the field's name."""


def renamed(shapes: Shapes) -> Renamed | None:
    """Recognise the format of foreign tensors and map their names to vitpar's; None for another family's tensors."""
    format_name = format_of(MARKS, shapes)
    if format_name is None:
        return None
    if format_name == "vitpar":
        names, unknown = mapped(shapes, OF_VIT["vitpar"])
        return Renamed("vitpar", names, {ours: shapes[name] for ours, name in names.items()}, tuple(unknown))
    skipped = {name: shape for name, shape in shapes.items() if _POSITIONS.fullmatch(name)}
    like, start = LIKE[format_name], re.compile(BLOCKS[format_name])
    decoding = {start.sub("", name, count=1): name for name in shapes if start.match(name)}
    encoding = [name for name in shapes if name not in skipped and not start.match(name)]
    names, unknown = mapped(encoding, (*OTHERS[format_name], *OF_VIT[like]))
    of_decoder, lost = mapped(decoding, OF_VIT[like])
    depth = _depth(names)
    ours = {name.replace(f"{_DECODER}.", f"blocks.{depth}."): foreign for name, foreign in names.items()}
    for name, foreign in of_decoder.items():
        ours[_shifted(name, depth + 1)] = decoding[foreign]
    return Renamed(
        format_name,
        ours,
        {name: shapes[foreign] for name, foreign in ours.items()},
        (*unknown, *(decoding[name] for name in lost)),
        skipped,
        ("the table of positions is left out: it is fixed, and vitpar computes it",) if skipped else (),
    )


def _number(name: str) -> int | None:
    match = re.match(r"blocks\.(\d{1,4})\.", name)
    return int(match[1]) if match else None


def _depth(names: Mapping[str, str]) -> int:
    """Return the number of blocks that `names` have."""
    return max((number for name in names if (number := _number(name)) is not None), default=-1) + 1


def _shifted(name: str, by: int) -> str:
    """Return the name of a parameter of the block `by` blocks later; other names are unchanged."""
    number = _number(name)
    return name if number is None else f"blocks.{number + by}.{name.split('.', 2)[2]}"


def infer_config(place: object, tensors: Renamed, hints: MAEHints, model: str | None = None) -> MAEConfig:
    """Return the configuration of the model.

    place: origin of the tensors, for messages.
    model: name of the model, for settings that neither tensors nor hints give; None if not named.

    Raises DataError for tensors that are not those of a masked autoencoder or that contradict the name.
    Raises ModelError for an unknown name.
    """
    named = model_config(model) if model is not None else None
    if named is not None and not isinstance(named, MAEConfig):
        raise DataError(f"'{place}' is a masked autoencoder, not a {model}: name another model, or omit --model")
    shapes = tensors.shapes

    def size(name: str, dim: int) -> int:
        return dimension(place, shapes, name, dim, "a masked autoencoder")

    depth = _encoder_depth(shapes)
    middle = f"blocks.{depth}"
    width, values = size("embed.patch_embed.proj.weight", 0), size("head.fc.weight", 0)
    patch = hints.patch_size or (named.patch_size if named else None) or max(1, round((values / 3) ** 0.5))
    image = hints.image_size or (named.image_size if named else None)
    positions = next((shape for name, shape in tensors.skipped.items() if "decoder" not in name), None)
    if image is None and positions is not None and len(positions) == 3:
        image = patch * round(max(0, positions[1] - 1) ** 0.5)
    heads = hints.heads or (named.num_heads if named else None) or HEADS.get(width)
    if heads is None:
        raise DataError(
            f"the tensors in '{place}' do not show the number of heads: name the model with --model, perhaps "
            "mae_vit_base, or use the folder with its config.json"
        )
    usual: MAEConfig | type[MAEConfig] = named or MAEConfig
    eps = 1e-12 if tensors.format == "transformers" and named is None else usual.norm_eps
    fields = {name: hints.decoder.get(name, getattr(usual, name)) for name in ("decoder_num_heads", "mask_ratio")}
    try:
        config = MAEConfig(
            name=model or "mae_custom",
            patch_size=patch,
            embed_dim=width,
            depth=depth,
            num_heads=heads,
            mlp_hidden_dim=size("blocks.0.mlp.fc1.weight", 0),
            image_size=usual.image_size if image is None else image,
            channels=max(1, values // patch**2),
            decoder_embed_dim=size(f"{middle}.proj.weight", 0),
            decoder_depth=_depth(tensors.names) - depth - 1,
            decoder_mlp_hidden_dim=size(f"blocks.{depth + 1}.mlp.fc1.weight", 0),
            norm_eps=eps if hints.norm_eps is None else hints.norm_eps,
            **fields,
        )
    except ModelError as error:
        raise DataError(f"'{place}' is not a vitpar model: {error}") from None
    for field in _COMPARED:
        if named is not None and getattr(named, field) != getattr(config, field):
            raise DataError(
                f"'{place}' is not a {model}: its {field} is {getattr(config, field)} instead of "
                f"{getattr(named, field)}: name another model, or omit --model"
            )
    return config


HEADS = {768: 12, 1024: 16, 1280: 16}
"""Heads of the published encoders by their width. The authors' files do not show them."""


def _encoder_depth(shapes: Shapes) -> int:
    """Return the number of the encoder's blocks: that of the block with the mask token."""
    return next((number for name in shapes if name.endswith(".mask_token") and (number := _number(name))), 0)


def parts(tensors: Renamed, config: MAEConfig) -> dict[str, MappedParameter]:
    """Return how each parameter of vitpar is made of the tensors that were found, by vitpar's name.

    The result is not checked: parameters may be missing or superfluous, and shapes may differ from those of `config`.
    """
    if tensors.format == "vitpar":
        return {ours: MappedParameter((name,), tensors.shapes[ours]) for ours, name in tensors.names.items()}
    after = config.depth + 1
    encoder, decoder, made = dict[str, str](), dict[str, str](), dict[str, MappedParameter]()
    for ours, foreign in tensors.names.items():
        number = _number(ours)
        if ours.startswith("embed.") or (number is not None and number < config.depth):
            encoder[ours] = foreign
        elif number is not None and number >= after:
            decoder[_shifted(ours, -after)] = foreign
        else:
            made[ours] = MappedParameter((foreign,), tensors.shapes[ours])
    made |= _parts_of(tensors, encoder, config.encoder, 0)
    return made | _parts_of(tensors, decoder, config.decoder, after)


def _parts_of(tensors: Renamed, names: Mapping[str, str], config: ViTConfig, by: int) -> dict[str, MappedParameter]:
    """Return the parameters of the encoder or decoder. by: number of its first block in the model."""
    like = LIKE[tensors.format]
    shapes = {name: tensors.shapes[_shifted(name, by)] for name in names}
    part = replace(tensors, format=like, names=names, shapes=shapes)
    return {_shifted(name, by): made for name, made in vit.parts(part, config).items()}
