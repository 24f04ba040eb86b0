"""Conversion of a Vision Transformer's parameters from other libraries: how their tensors become vitpar's.

Names are in ``vitpar.models.vit.foreign_names``. Besides, the tensors differ as follows:

- transformers and some of timm's models have separate queries, keys and values; others order their rows
  (q|k|v, head, feature) where vitpar has (head, q|k|v, feature). The same goes for gates and values of a gated MLP.
- All project patches by a convolution; flattening the last three dimensions of its weight gives vitpar's weight.
- A class token that is not read (mean pooling), or a distillation token without a classifier, is a register in vitpar.
- transformers' DINOv2 with registers adds a position to the class token but none to the registers: here it is a part of
  the class token.
- timm's parallel blocks have separate products for attention and MLP at their end; vitpar has one.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor

from vitpar.models.foreign import MappedParameter, Renamed, Shapes, format_of, mapped
from vitpar.models.vit.config import ViTConfig
from vitpar.models.vit.foreign_names import FORMATS, MARKS, NEEDLESS
from vitpar.models.vit.infer import infer_config

__all__ = ["infer_config", "parts", "renamed"]


def renamed(shapes: Shapes) -> Renamed | None:
    """Recognise the format of foreign tensors and map their names to vitpar's; None for another family's tensors."""
    format_name = format_of(MARKS, shapes)
    if format_name is None:
        return None
    skipped, notes = dict[str, tuple[int, ...]](), dict[str, None]()
    for name, shape in shapes.items():
        for pattern, note in NEEDLESS.get(format_name, ()):
            if re.fullmatch(pattern, name):
                skipped[name] = shape
                notes |= {note: None} if note else {}
    names, unknown = mapped((name for name in shapes if name not in skipped), FORMATS[format_name])
    ours = {name: shapes[foreign] for name, foreign in names.items()}
    width, classifier = ours.get("embed.patch_embed.proj.weight", ())[:1], ours.get("head.fc.weight", ())
    if format_name == "transformers" and classifier[1:] == tuple(2 * features for features in width) != ():
        notes["the classifier is dropped: it reads the class token and the mean of the patches, vitpar's only one"] = (
            None
        )
        for name in ("head.fc.weight", "head.fc.bias"):
            if name in names:
                skipped[names.pop(name)] = ours.pop(name)
    # Gated MLPs of transformers call the values as plain MLPs call their first layer.
    for name in [name for name in names if ".mlp.fc1." in name and name.replace(".fc1.", ".gate.") in names]:
        value = name.replace(".fc1.", ".value.")
        names[value], ours[value] = names.pop(name), ours.pop(name)
    return Renamed(format_name, names, ours, tuple(unknown), skipped, tuple(notes))


def parts(tensors: Renamed, config: ViTConfig) -> dict[str, MappedParameter]:
    """Return how each parameter of vitpar is made of the tensors that were found, by vitpar's name.

    The result is not checked: parameters may be missing or superfluous, and shapes may differ from those of `config`.
    """
    made = {ours: MappedParameter((name,), tensors.shapes[ours]) for ours, name in tensors.names.items()}
    if tensors.format == "vitpar":
        return made
    _unfold_patches(made)
    for index in range(config.depth):
        _fuse_queries(made, f"blocks.{index}.attn", config.num_heads)
        _fuse_gates(made, f"blocks.{index}.mlp", config)
        if config.parallel_blocks:
            _fuse_products(made, f"blocks.{index}", config)
    _fuse_pooling(made, config)
    _split_positions(made, config)
    _make_registers(made, config)
    return made


def _unfold_patches(made: dict[str, MappedParameter]) -> None:
    part = made.get("embed.patch_embed.proj.weight")
    if part and len(part.shape) == 4:
        shape = (part.shape[0], part.shape[1] * part.shape[2] * part.shape[3])
        made["embed.patch_embed.proj.weight"] = MappedParameter(part.names, shape, lambda kernel: kernel.flatten(1))


def _fuse(made: dict[str, MappedParameter], fused: str, apart: list[str], order: Callable[..., Tensor]) -> None:
    """Make a parameter of those `apart`, or of the one that has them all already, with `order` of the rows."""
    if all(name in made for name in apart):
        several = [made.pop(name) for name in apart]
        if len({part.shape for part in several}) == 1:
            rows, *columns = several[0].shape
            names = tuple(part.names[0] for part in several)
            made[fused] = MappedParameter(names, (len(apart) * rows, *columns), order)
    elif fused in made:
        made[fused] = MappedParameter(made[fused].names, made[fused].shape, order)


def _fuse_queries(made: dict[str, MappedParameter], start: str, heads: int) -> None:
    """Reorder the rows of q, k and v, from one tensor or three, to (head, q|k|v, feature)."""

    def ordered(*tensors: Tensor) -> Tensor:
        return rearrange(torch.cat(tensors), "(three h d) ... -> (h three d) ...", three=3, h=heads)

    for end in ("weight", "bias"):
        _fuse(made, f"{start}.qkv.{end}", [f"{start}.{letter}.{end}" for letter in "qkv"], ordered)
    for letter in "qv":  # keys without biases
        if f"{start}.{letter}.bias" in made:
            made[f"{start}.{letter}_bias"] = made.pop(f"{start}.{letter}.bias")


def _fuse_gates(made: dict[str, MappedParameter], start: str, config: ViTConfig) -> None:
    """Reorder the rows of gates and values, from one tensor or two, to (hidden feature, gate|value)."""

    def ordered(*tensors: Tensor) -> Tensor:
        return rearrange(torch.cat(tensors), "(two h) ... -> (h two) ...", two=2)

    if config.gates == 2:
        for end in ("weight", "bias"):
            _fuse(made, f"{start}.fc1.{end}", [f"{start}.{name}.{end}" for name in ("gate", "value")], ordered)


def _fuse_products(made: dict[str, MappedParameter], start: str, config: ViTConfig) -> None:
    """Reorder the rows and columns of a parallel block's products to (head, attention|MLP, feature)."""
    heads, d, h, gates = config.num_heads, config.embed_dim, config.mlp_hidden_dim, config.gates

    def rows(tensor: Tensor) -> Tensor:
        hidden, *three = tensor.split([gates * h, d, d, d])
        hidden = rearrange(hidden, "(gates h) ... -> (h gates) ...", gates=gates)
        pieces = [rearrange(piece, "(h d) ... -> h d ...", h=heads) for piece in (*three, hidden)]
        return torch.cat(pieces, dim=1).flatten(0, 1)

    def columns(*tensors: Tensor) -> Tensor:
        both = torch.cat(tensors, dim=1).split([d, h], dim=1)
        return torch.cat([rearrange(part, "o (h d) -> o h d", h=heads) for part in both], dim=2).flatten(1)

    for end in ("weight", "bias"):
        if part := made.get(f"{start}.in_proj.{end}"):
            made[f"{start}.in_proj.{end}"] = MappedParameter(part.names, part.shape, rows)
    if part := made.get(f"{start}.mlp_bias"):
        made[f"{start}.mlp_bias"] = MappedParameter(
            part.names, part.shape, lambda bias: rearrange(bias, "(gates h) -> (h gates)", gates=gates)
        )
    apart = [f"{start}.{name}_out.weight" for name in ("attn", "mlp")]
    if all(name in made for name in apart):
        names = tuple(made.pop(name).names[0] for name in apart)
        made[f"{start}.out_proj.weight"] = MappedParameter(names, (d, d + h), columns)
        biases = [made.pop(f"{start}.{name}_out.bias", None) for name in ("attn", "mlp")]
        if biases[0] and biases[1]:
            names = (*biases[0].names, *biases[1].names)
            made[f"{start}.out_proj.bias"] = MappedParameter(names, (d,), torch.add)
    elif part := made.get(f"{start}.out_proj.weight"):
        made[f"{start}.out_proj.weight"] = MappedParameter(part.names, part.shape, columns)


def _fuse_pooling(made: dict[str, MappedParameter], config: ViTConfig) -> None:
    """Reorder the rows of the keys and values that are pooled to (head, k|v, feature), and separate their query."""
    start, d = "head.attn_pool", config.embed_dim

    def ordered(tensor: Tensor) -> Tensor:
        return rearrange(tensor, "(two h d) ... -> (h two d) ...", two=2, h=config.num_heads)

    for end in ("weight", "bias"):
        if part := made.pop(f"{start}.in_proj.{end}", None):
            made[f"{start}.q.{end}"] = MappedParameter(part.names, (d, *part.shape[1:]), lambda t: t[:d])
            shape = (2 * d, *part.shape[1:])
            made[f"{start}.kv.{end}"] = MappedParameter(part.names, shape, lambda t: ordered(t[d:]))
        elif part := made.get(f"{start}.kv.{end}"):
            made[f"{start}.kv.{end}"] = MappedParameter(part.names, part.shape, ordered)


def _split_positions(made: dict[str, MappedParameter], config: ViTConfig) -> None:
    """Add a dimension to a table without samples, and the class token's position to it where others have none."""
    part = made.get("embed.pos_embed")
    if part and len(part.shape) == 2:
        part = made["embed.pos_embed"] = MappedParameter(part.names, (1, *part.shape), lambda table: table[None])
    if part and not config.prefix_positions and part.shape[1] == config.patches + 1:
        made["embed.pos_embed"] = MappedParameter(
            part.names, (1, config.patches, *part.shape[2:]), lambda table: table[:, 1:]
        )
        if token := made.get("embed.cls_token"):
            names = (*token.names, *part.names)
            made["embed.cls_token"] = MappedParameter(names, token.shape, lambda one, table: one + table[:, :1])


def _make_registers(made: dict[str, MappedParameter], config: ViTConfig) -> None:
    """Turn tokens that the head does not read into registers, in the order of the tokens."""
    unread = [
        *(["embed.cls_token"] if config.pool != "cls" else []),
        *(["embed.dist_token"] if not config.distillation else []),
    ]
    tokens = [made.pop(name) for name in unread if name in made]
    if not tokens:
        return
    if "embed.reg_token" in made:
        tokens.append(made.pop("embed.reg_token"))
    count = sum(part.shape[1] for part in tokens if len(part.shape) == 3)

    def joined(*tensors: Tensor) -> Tensor:
        made_of, taken = [], list(tensors)
        for part in tokens:
            made_of.append(part.make(*(taken.pop(0) for _ in part.names)))
        return torch.cat(made_of, dim=1)

    names = tuple(name for part in tokens for name in part.names)
    made["embed.reg_token"] = MappedParameter(names, (1, count, config.embed_dim), joined)
