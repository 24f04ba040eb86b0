"""Names of a ViT's parameters in other libraries, and how their tensors become vitpar's.

Three formats, told apart by the name of the patches' projection: timm's (``timm/models/vision_transformer.py`` and
``deit.py``, 1.0; the files of DeiT, DeiT III and the original ViT too), transformers' (``modeling_vit.py`` and
``modeling_deit.py``, 4 and 5), and vitpar's own. Names become vitpar's by patterns; the tensors then differ in that

- transformers keeps queries, keys and values apart, and timm orders their rows (q|k|v, head, feature) where vitpar has
  (head, q|k|v, feature);
- both project patches by a convolution, whose weight is vitpar's with its last three dims unfolded;
- timm may add no positions to the tokens before the patches: zero positions do the same;
- a class token that is not read (pooling by the mean), or a distillation token without a classifier, is what vitpar
  calls a register.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from vitpar.errors import DataError
from vitpar.models.config import ViTConfig
from vitpar.weights.shards import listed

_END = r"(\.weight|\.bias)"
_BLOCK = r"(?:vit\.|deit\.)?(?:encoder\.layer|layers)\.(\d+)\."
_EMBEDDINGS = r"(?:vit\.|deit\.)?embeddings\."
_FORMATS: dict[str, tuple[tuple[str, str], ...]] = {
    "vitpar": (("((?:stem|blocks|head)\\..+)", r"\1"),),
    "timm": (
        (rf"patch_embed\.proj{_END}", r"stem.proj\1"),
        (r"(cls_token|dist_token|reg_token|pos_embed)", r"stem.\1"),
        (r"blocks\.(\d+)\.(?:ls([12])\.gamma|gamma_([12]))", r"blocks.\1.gamma\2\3"),
        (rf"(blocks\.\d+\.(?:norm[12]|attn\.(?:qkv|proj|q_norm|k_norm)|mlp\.fc[12])){_END}", r"\1\2"),
        (rf"norm{_END}", r"head.norm\1"),
        (rf"pre_logits\.fc{_END}", r"head.representation\1"),
        (rf"head{_END}", r"head.fc\1"),
        (rf"head_dist{_END}", r"head.fc_dist\1"),
    ),
    "transformers": (
        (rf"{_EMBEDDINGS}patch_embeddings\.projection{_END}", r"stem.proj\1"),
        (rf"{_EMBEDDINGS}cls_token", "stem.cls_token"),
        (rf"{_EMBEDDINGS}distillation_token", "stem.dist_token"),
        (rf"{_EMBEDDINGS}position_embeddings", "stem.pos_embed"),
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
_MARKS = {
    "vitpar": r"stem\.proj\.weight",
    "timm": r"patch_embed\.proj\.weight",
    "transformers": rf"{_EMBEDDINGS}patch_embeddings\.projection\.weight",
}
_POOLER = re.compile(r"(?:vit\.|deit\.)?pooler\.dense\.(?:weight|bias)")
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Renamed:
    """Somebody's tensors under vitpar's names, but for q, k and v where they are apart. names: theirs, by ours."""

    format: str
    names: Mapping[str, str]
    shapes: Shapes
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class MappedParameter:
    """A parameter of vitpar's, made of others. names: theirs. shape: when made."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    make: Callable[..., Tensor] = lambda tensor: tensor


def renamed(place: object, shapes: Shapes) -> Renamed:
    """Tells the format by the names and gives the tensors ours. Raises DataError for names of none, or that a ViT of
    that format has not."""
    format = next((f for f, mark in _MARKS.items() if any(re.fullmatch(mark, name) for name in shapes)), None)
    if format is None:
        raise DataError(
            f"'{place}' names its tensors neither as timm nor as transformers' ViT nor as vitpar does: it has "
            f"{listed(sorted(shapes))}"
        )
    names, unknown, notes = dict[str, str](), list[str](), tuple[str, ...]()
    for name in shapes:
        if format == "transformers" and _POOLER.fullmatch(name):
            notes = ("the pooler, which no classifier of transformers reads, is left out",)
            continue
        matches = ((re.fullmatch(pattern, name), ours) for pattern, ours in _FORMATS[format])
        ours = next((match.expand(template) for match, template in matches if match), None)
        if ours is None or ours in names:
            unknown.append(name)
        else:
            names[ours] = name
    if unknown:
        why = " (its mean over patches comes before the norm, vitpar's after)" if "fc_norm.weight" in unknown else ""
        raise DataError(f"vitpar's ViT has no {listed(unknown)}{why}, which '{place}' has: it is of another model")
    return Renamed(format, names, {ours: shapes[name] for ours, name in names.items()}, notes)


def parts(found: Renamed, config: ViTConfig) -> dict[str, MappedParameter]:
    """How each parameter of vitpar's, by name, is made of the tensors that were found; some may be missing, further
    ones there, and their shapes others than `config` has."""
    made = {ours: MappedParameter((name,), found.shapes[ours]) for ours, name in found.names.items()}
    if found.format != "vitpar":
        _unfold_patches(made)
        _fuse_queries(made, config.num_heads)
        _make_registers(made, config)
    _complete_positions(made, config)
    return made


def _unfold_patches(made: dict[str, MappedParameter]) -> None:
    part = made.get("stem.proj.weight")
    if part and len(part.shape) == 4:
        shape = (part.shape[0], part.shape[1] * part.shape[2] * part.shape[3])
        made["stem.proj.weight"] = MappedParameter(part.names, shape, lambda kernel: kernel.flatten(1))


def _fuse_queries(made: dict[str, MappedParameter], heads: int) -> None:
    """Rows in the order (head, q|k|v, feature), from one tensor or from three."""

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
    """Tokens that take part and are not read, in the order they stand in."""
    unread = [
        *(["stem.cls_token"] if config.pool == "avg" else []),
        *(["stem.dist_token"] if not config.distillation else []),
    ]
    tokens = [made.pop(name) for name in unread if name in made]
    if not tokens:
        return
    if "stem.reg_token" in made:
        tokens.append(made.pop("stem.reg_token"))
    count = sum(part.shape[1] for part in tokens if len(part.shape) == 3)
    names = tuple(name for part in tokens for name in part.names)
    made["stem.reg_token"] = MappedParameter(names, (1, count, config.embed_dim), lambda *each: torch.cat(each, dim=1))


def _complete_positions(made: dict[str, MappedParameter], config: ViTConfig) -> None:
    """Zero positions of the tokens before the patches, where there are none."""
    part = made.get("stem.pos_embed")
    if part and part.shape == (1, config.patches, config.embed_dim) and config.prefix_tokens:
        zeros = torch.zeros(1, config.prefix_tokens, config.embed_dim)
        shape = (1, config.tokens, config.embed_dim)
        made["stem.pos_embed"] = MappedParameter(
            part.names, shape, lambda table: torch.cat([zeros.to(table.dtype), table], dim=1)
        )
