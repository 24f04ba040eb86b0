"""Conversion of a ViT's parameters from other libraries: their names, and how their tensors become vitpar's.

There are three formats, recognised by the name of the patch projection: timm's (``timm/models/vision_transformer.py``
and ``deit.py``, 1.0, which includes the files of DeiT, DeiT III and the original ViT), transformers'
(``modeling_vit.py`` and ``modeling_deit.py``, 4 and 5), and vitpar's own. Regular expressions map the names to
vitpar's. The tensors then differ as follows:

- transformers has separate queries, keys and values, and timm orders their rows (q|k|v, head, feature) where vitpar has
  (head, q|k|v, feature).
- Both project patches by a convolution; flattening the last three dimensions of its weight gives vitpar's weight.
- timm may add no position embedding to the tokens before the patches, which is equivalent to zeros.
- A class token that is not read (mean pooling), or a distillation token without a classifier, is a register in vitpar.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from vitpar.errors import DataError
from vitpar.former_names import present_parameter
from vitpar.models.vit.config import ViTConfig
from vitpar.weights.shards import listed

_END = r"(\.weight|\.bias)"
_BLOCK = r"(?:vit\.|deit\.)?(?:encoder\.layer|layers)\.(\d+)\."
_EMBEDDINGS = r"(?:vit\.|deit\.)?embeddings\."
# For each format: pairs of a pattern of its names and the template of vitpar's name.
_FORMATS: dict[str, tuple[tuple[str, str], ...]] = {
    "vitpar": (("((?:embed|blocks|head)\\..+)", r"\1"),),
    "timm": (
        (rf"patch_embed\.proj{_END}", r"embed.patch_embed.proj\1"),
        (r"(cls_token|dist_token|reg_token|pos_embed)", r"embed.\1"),
        (r"blocks\.(\d+)\.(?:ls([12])\.gamma|gamma_([12]))", r"blocks.\1.ls\2\3.gamma"),
        (rf"(blocks\.\d+\.(?:norm[12]|attn\.(?:qkv|proj|q_norm|k_norm)|mlp\.fc[12])){_END}", r"\1\2"),
        (rf"norm{_END}", r"head.norm\1"),
        (rf"pre_logits\.fc{_END}", r"head.representation\1"),
        (rf"head{_END}", r"head.fc\1"),
        (rf"head_dist{_END}", r"head.fc_dist\1"),
    ),
    "transformers": (
        (rf"{_EMBEDDINGS}patch_embeddings\.projection{_END}", r"embed.patch_embed.proj\1"),
        (rf"{_EMBEDDINGS}cls_token", "embed.cls_token"),
        (rf"{_EMBEDDINGS}distillation_token", "embed.dist_token"),
        (rf"{_EMBEDDINGS}position_embeddings", "embed.pos_embed"),
        (rf"{_BLOCK}layernorm_before{_END}", r"blocks.\1.norm1\2"),
        (rf"{_BLOCK}layernorm_after{_END}", r"blocks.\1.norm2\2"),
        (rf"{_BLOCK}attention\.(?:attention\.)?([qkv])(?:uery|ey|alue|_proj){_END}", r"blocks.\1.attn.\2\3"),
        (rf"{_BLOCK}attention\.(?:output\.dense|o_proj){_END}", r"blocks.\1.attn.proj\2"),
        (rf"{_BLOCK}(?:intermediate\.dense|mlp\.fc1){_END}", r"blocks.\1.mlp.fc1\2"),
        (rf"{_BLOCK}(?:output\.dense|mlp\.fc2){_END}", r"blocks.\1.mlp.fc2\2"),
        (rf"(?:vit\.|deit\.)?layernorm{_END}", r"head.norm\1"),
        (rf"(?:cls_)?classifier{_END}", r"head.fc\1"),
        (rf"distillation_classifier{_END}", r"head.fc_dist\1"),
    ),
}
# Name of the patch projection, which identifies a format.
_MARKS = {
    "vitpar": r"embed\.patch_embed\.proj\.weight",
    "timm": r"patch_embed\.proj\.weight",
    "transformers": rf"{_EMBEDDINGS}patch_embeddings\.projection\.weight",
}
_POOLER = re.compile(r"(?:vit\.|deit\.)?pooler\.dense\.(?:weight|bias)")
Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of tensors by name."""


@dataclass(frozen=True)
class Renamed:
    """Foreign tensors under vitpar's names, except that separate q, k and v remain separate."""

    format: str
    """Format of the foreign names: "vitpar", "timm" or "transformers"."""
    names: Mapping[str, str]
    """Foreign names by vitpar's names."""
    shapes: Shapes
    """Shapes of the foreign tensors by vitpar's names."""
    notes: tuple[str, ...] = ()
    """Sentences for the user."""


@dataclass(frozen=True)
class MappedParameter:
    """Parameter of vitpar that is made of foreign tensors."""

    names: tuple[str, ...]
    """Names of the foreign tensors."""
    shape: tuple[int, ...]
    """Shape of the parameter."""
    make: Callable[..., Tensor] = lambda tensor: tensor
    """Function from the foreign tensors, in the order of `names`, to the parameter."""


def renamed(place: object, shapes: Shapes) -> Renamed:
    """Recognise the format of foreign tensors and map their names to vitpar's.

    place: origin of the tensors, for messages.

    Raises DataError for an unknown format, and for names that a ViT of the format does not have.
    """
    format = next((f for f, mark in _MARKS.items() if any(re.fullmatch(mark, name) for name in shapes)), None)
    if format is None:
        if former := next((name for name in shapes if present_parameter(name) != name), None):
            raise DataError(
                f"'{place}' was written by an earlier version of vitpar: its tensor '{former}' is now called "
                f"'{present_parameter(former)}'; rename its tensors"
            )
        raise DataError(
            f"the tensor names in '{place}' are not those of timm's, transformers' or vitpar's ViT: it has "
            f"{listed(sorted(shapes))}"
        )
    names, unknown, notes = dict[str, str](), list[str](), tuple[str, ...]()
    for name in shapes:
        if format == "transformers" and _POOLER.fullmatch(name):
            notes = ("the pooler is dropped, since no classifier of transformers uses it",)
            continue
        matches = ((re.fullmatch(pattern, name), ours) for pattern, ours in _FORMATS[format])
        ours = next((match.expand(template) for match, template in matches if match), None)
        if ours is None or ours in names:
            unknown.append(name)
        else:
            names[ours] = name
    if unknown:
        why = " (it averages patches before the norm, vitpar after)" if "fc_norm.weight" in unknown else ""
        raise DataError(f"'{place}' has {listed(unknown)}, which vitpar's ViT lacks{why}: use another model")
    return Renamed(format, names, {ours: shapes[name] for ours, name in names.items()}, notes)


def parts(found: Renamed, config: ViTConfig) -> dict[str, MappedParameter]:
    """Return how each parameter of vitpar is made of the tensors that were found, by vitpar's name.

    The result is not checked: parameters may be missing or superfluous, and shapes may differ from those of `config`.
    """
    made = {ours: MappedParameter((name,), found.shapes[ours]) for ours, name in found.names.items()}
    if found.format != "vitpar":
        _unfold_patches(made)
        _fuse_queries(made, config.num_heads)
        _make_registers(made, config)
    _complete_positions(made, config)
    return made


def _unfold_patches(made: dict[str, MappedParameter]) -> None:
    part = made.get("embed.patch_embed.proj.weight")
    if part and len(part.shape) == 4:
        shape = (part.shape[0], part.shape[1] * part.shape[2] * part.shape[3])
        made["embed.patch_embed.proj.weight"] = MappedParameter(part.names, shape, lambda kernel: kernel.flatten(1))


def _fuse_queries(made: dict[str, MappedParameter], heads: int) -> None:
    """Reorder the rows of q, k and v, from one tensor or three, to (head, q|k|v, feature)."""

    def ordered(*tensors: Tensor) -> Tensor:
        return rearrange(torch.cat(tensors), "(three h d) ... -> (h three d) ...", three=3, h=heads)

    blocks = dict.fromkeys(".".join(name.split(".")[:2]) for name in made if name.startswith("blocks."))
    for block in blocks:
        for end in ("weight", "bias"):
            fused = f"{block}.attn.qkv.{end}"
            apart = [f"{block}.attn.{letter}.{end}" for letter in "qkv"]
            if all(name in made for name in apart):
                three = [made.pop(name) for name in apart]
                if len({part.shape for part in three}) == 1:
                    rows, *columns = three[0].shape
                    made[fused] = MappedParameter(tuple(part.names[0] for part in three), (3 * rows, *columns), ordered)
            elif fused in made:
                made[fused] = MappedParameter(made[fused].names, made[fused].shape, ordered)


def _make_registers(made: dict[str, MappedParameter], config: ViTConfig) -> None:
    """Turn tokens that the head does not read into registers, in the order of the tokens."""
    unread = [
        *(["embed.cls_token"] if config.pool == "avg" else []),
        *(["embed.dist_token"] if not config.distillation else []),
    ]
    tokens = [made.pop(name) for name in unread if name in made]
    if not tokens:
        return
    if "embed.reg_token" in made:
        tokens.append(made.pop("embed.reg_token"))
    count = sum(part.shape[1] for part in tokens if len(part.shape) == 3)
    names = tuple(name for part in tokens for name in part.names)
    made["embed.reg_token"] = MappedParameter(names, (1, count, config.embed_dim), lambda *each: torch.cat(each, dim=1))


def _complete_positions(made: dict[str, MappedParameter], config: ViTConfig) -> None:
    """Add zero position embeddings for the tokens before the patches if there are none for them."""
    part = made.get("embed.pos_embed")
    if part and part.shape == (1, config.patches, config.embed_dim) and config.prefix_tokens:
        zeros = torch.zeros(1, config.prefix_tokens, config.embed_dim)
        shape = (1, config.tokens, config.embed_dim)
        made["embed.pos_embed"] = MappedParameter(
            part.names, shape, lambda table: torch.cat([zeros.to(table.dtype), table], dim=1)
        )
