"""Conversion of a Swin Transformer's parameters from other libraries.

There are four formats: timm's (``timm/models/swin_transformer.py``, 1.0), Microsoft's original one, transformers'
(``modeling_swin.py``, 4 and 5), and vitpar's own. Regular expressions map the names to those of stages, whose blocks
are then numbered through. The tensors differ as follows:

- Blocks are numbered within each stage. Microsoft and transformers merge patches at the end of a stage, timm and vitpar
  at the beginning of the next.
- transformers has separate queries, keys and values, and timm orders their rows (q|k|v, head, feature) where vitpar has
  (head, q|k|v, feature).
- They order merged features (neighbour, feature) where vitpar has (feature, neighbour).
- Their table of relative position biases is [offsets · offsets, heads], vitpar's [heads, offsets, offsets].
- All project patches by a convolution; flattening the last three dimensions of its weight gives vitpar's weight.
- Microsoft's files contain relative positions and masks, which vitpar computes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence

import torch
from einops import rearrange
from torch import Tensor

from vitpar.errors import DataError, ModelError
from vitpar.limits import MAX_WIDTH
from vitpar.models.families import model_config
from vitpar.models.foreign import ImportHints, MappedParameter, Patterns, Renamed, Shapes, dimension, format_of, mapped
from vitpar.models.swin.config import SwinConfig

_END = r"(\.weight|\.bias)"
_TIMM_BLOCK = r"layers\.(\d{1,3})\.blocks\.(\d{1,3})\."
_LAYER = r"(?:swin\.)?encoder\.layers\.(\d{1,3})\."
_BLOCK = rf"{_LAYER}blocks\.(\d{{1,3}})\."
_EMBEDDINGS = r"(?:swin\.)?embeddings\."
_STAGE_BLOCK = r"stages.\1.blocks.\2."
_TABLE = "attn.relative_position_bias_table"
_PROJECTION = "embed.patch_embed.proj.weight"
_TIMM: Patterns = (
    (rf"patch_embed\.(proj|norm){_END}", r"embed.patch_embed.\1\2"),
    (rf"{_TIMM_BLOCK}(norm[12]|attn\.(?:qkv|proj)|mlp\.fc[12]){_END}", rf"{_STAGE_BLOCK}\3\4"),
    (rf"{_TIMM_BLOCK}attn\.relative_position_bias_table", f"{_STAGE_BLOCK}{_TABLE}"),
    (rf"norm{_END}", r"head.norm\1"),
    (rf"head(?:\.fc)?{_END}", r"head.fc\1"),
)
_MERGING = r"(norm\.weight|norm\.bias|reduction\.weight)"
FORMATS: dict[str, Patterns] = {
    "vitpar": ((r"((?:embed|blocks\.\d{1,4}|head)\..+)", r"\1"),),
    "timm": (*_TIMM, (rf"layers\.(\d{{1,3}})\.downsample\.{_MERGING}", r"stages.\1.begin.downsample.\2")),
    "microsoft": (*_TIMM, (rf"layers\.(\d{{1,3}})\.downsample\.{_MERGING}", r"stages.\1.end.downsample.\2")),
    "transformers": (
        (rf"{_EMBEDDINGS}patch_embeddings\.projection{_END}", r"embed.patch_embed.proj\1"),
        (rf"{_EMBEDDINGS}norm{_END}", r"embed.patch_embed.norm\1"),
        (rf"{_BLOCK}layernorm_before{_END}", rf"{_STAGE_BLOCK}norm1\3"),
        (rf"{_BLOCK}layernorm_after{_END}", rf"{_STAGE_BLOCK}norm2\3"),
        (rf"{_BLOCK}attention\.(?:self\.)?([qkv])(?:uery|ey|alue|_proj){_END}", rf"{_STAGE_BLOCK}attn.\3\4"),
        (rf"{_BLOCK}attention\.(?:output\.dense|o_proj){_END}", rf"{_STAGE_BLOCK}attn.proj\3"),
        (
            rf"{_BLOCK}attention\.(?:self|relative_position_bias)\.relative_position_bias_table",
            f"{_STAGE_BLOCK}{_TABLE}",
        ),
        (rf"{_BLOCK}(?:intermediate\.dense|mlp\.fc1){_END}", rf"{_STAGE_BLOCK}mlp.fc1\3"),
        (rf"{_BLOCK}(?:output\.dense|mlp\.fc2){_END}", rf"{_STAGE_BLOCK}mlp.fc2\3"),
        (rf"{_LAYER}downsample\.{_MERGING}", r"stages.\1.end.downsample.\2"),
        (rf"(?:swin\.)?layernorm{_END}", r"head.norm\1"),
        (rf"classifier{_END}", r"head.fc\1"),
    ),
}
"""Patterns of names by format. Their templates give the stage of a block, which `renamed` numbers through."""
MARKS = {
    "vitpar": r"blocks\.0\.attn\.relative_position_bias_table",
    "timm": r"layers\.0\.blocks\.0\.attn\.relative_position_bias_table",
    "transformers": rf"{_BLOCK}attention\.(?:self|relative_position_bias)\.relative_position_bias_table",
}
"""Name of a table of biases, which identifies the family and the format; Microsoft's is timm's."""
SKIPPED = re.compile(
    rf"{_TIMM_BLOCK}(?:attn\.relative_position_index|attn_mask)"
    rf"|{_BLOCK}attention\.(?:self|relative_position_bias)\.relative_position_index"
)
"""Names of tensors that are no parameters."""
_MASK = re.compile(rf"{_TIMM_BLOCK}attn_mask")
_IN_STAGE = re.compile(r"stages\.(\d+)\.(?:blocks\.(\d+)|(begin|end))\.(.+)")
_A_SWIN = "a Swin Transformer"


def renamed(shapes: Shapes) -> Renamed | None:
    """Recognise the format of foreign tensors and map their names to vitpar's; None for another family's tensors."""
    format_name = format_of(MARKS, shapes)
    if format_name is None:
        return None
    if format_name == "timm" and "layers.0.downsample.reduction.weight" in shapes:
        format_name = "microsoft"  # it has one after the first stage, timm never before it
    skipped = {name: shape for name, shape in shapes.items() if format_name != "vitpar" and SKIPPED.fullmatch(name)}
    names, unknown = mapped((name for name in shapes if name not in skipped), FORMATS[format_name])
    names = _numbered(names)
    return Renamed(format_name, names, {ours: shapes[name] for ours, name in names.items()}, tuple(unknown), skipped)


def _numbered(names: Mapping[str, str]) -> dict[str, str]:
    """Return foreign names by names that number the blocks of all stages through."""
    matches = {name: _IN_STAGE.fullmatch(name) for name in names}
    depths: dict[int, int] = {}
    for match in matches.values():
        if match and match[2]:
            depths[int(match[1])] = max(depths.get(int(match[1]), 0), int(match[2]) + 1)

    def number(match: re.Match[str]) -> int:
        stage = int(match[1]) + (match[3] == "end")
        return sum(depth for other, depth in depths.items() if other < stage) + int(match[2] or 0)

    return {
        f"blocks.{number(match)}.{match[4]}" if (match := matches[ours]) else ours: name for ours, name in names.items()
    }


def infer_config(place: object, tensors: Renamed, hints: ImportHints, model: str | None = None) -> SwinConfig:
    """Return the configuration of the model. A model without classifier gets one class.

    place: origin of the tensors, for messages.
    model: name of the model, for settings that neither tensors nor hints give; None if not named.

    Raises DataError for tensors that are not those of a Swin Transformer or that contradict the name.
    Raises ModelError for an unknown name.
    """
    named = model_config(model) if model is not None else None
    if named is not None and not isinstance(named, SwinConfig):
        raise DataError(f"'{place}' is a Swin Transformer, not a {model}: name another model, or omit --model")
    if tensors.format == "transformers" and hints.norm_eps not in (None, SwinConfig.norm_eps):
        # transformers gives this epsilon to some norms only: those of merging and embedding have torch's default.
        raise DataError(
            f"'{place}' has layer_norm_eps {hints.norm_eps}: only models with {SwinConfig.norm_eps} in every norm can "
            "be imported"
        )

    def size(name: str, dim: int) -> int:
        return dimension(place, tensors.shapes, name, dim, _A_SWIN)

    patch, channels = _patch(size, tensors.shapes, hints.patch_size or (named.patch_size if named else None))
    if channels != 3:
        raise DataError(f"'{place}' has {channels} input channels, but only models with 3 can be imported")
    blocks = {int(name.split(".")[1]) for name in tensors.shapes if name.startswith("blocks.")}
    firsts = sorted({0} | {n for n in blocks if any(n > 0 and f"blocks.{n}.{m}" in tensors.shapes for m in _MERGED)})
    if len(firsts) > (most := MAX_WIDTH.bit_length()):
        raise DataError(f"'{place}' has {len(firsts)} stages: models with more than {most} cannot be imported")
    depths = [after - first for first, after in zip(firsts, [*firsts[1:], max(blocks) + 1], strict=True)]
    tables = [f"blocks.{first}.{_TABLE}" for first in firsts]
    ours = tensors.format == "vitpar"
    heads = [size(name, 0 if ours else 1) for name in tables]
    windows = [((size(name, 1) if ours else math.isqrt(size(name, 0))) + 1) // 2 for name in tables]
    window, width = max(windows), size(_PROJECTION, 0)
    grid = _grid_of_masks(tensors.skipped) or _grid_of_windows(place, windows)
    known = hints.image_size or (named.image_size if named else None)
    # With neither, the size for which the last stage has one window, as in the published models.
    image_size = grid * patch if grid else known or window * 2 ** (len(firsts) - 1) * patch
    if named and [stage.window for stage in named.stages] == windows and named.image_size == image_size:
        window = named.window_size  # it may be larger than every stage
    try:
        config = SwinConfig(
            name=model or "swin_custom",
            patch_size=patch,
            embed_dim=width,
            depths=tuple(depths),
            num_heads=tuple(heads),
            window_size=window,
            mlp_ratio=_mlp_ratio(width, [size(f"blocks.{first}.mlp.fc1.weight", 0) for first in firsts]),
            image_size=image_size,
            num_classes=size("head.fc.weight", 0) if "head.fc.weight" in tensors.shapes else 1,
            channels=channels,
            norm_eps=SwinConfig.norm_eps if hints.norm_eps is None else hints.norm_eps,
        )
    except ModelError as error:
        raise DataError(f"'{place}' is not a vitpar model: {error}") from None
    if windows != (fit := [stage.window for stage in config.stages]):
        raise DataError(
            f"'{place}' has windows of {_listed(windows)} tokens in its stages, but images of {image_size} pixels need "
            f"{_listed(fit)}: only models with one window size can be imported"
        )
    for field in ("patch_size", "embed_dim", "depths", "num_heads", "window_size", "mlp_ratio"):
        if named and getattr(named, field) != getattr(config, field):
            raise DataError(
                f"'{place}' is not a {model}: its {field} is {_listed(getattr(config, field))} instead of "
                f"{_listed(getattr(named, field))}: name another model, or omit --model"
            )
    return config


_MERGED = ("downsample.norm.weight", "downsample.norm.bias", "downsample.reduction.weight")


def _listed(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _patch(size: Callable[[str, int], int], shapes: Shapes, known: int | None) -> tuple[int, int]:
    """Return the height of a patch in pixels and the number of channels.

    known: height of a patch by hints or the named model; None if unknown.
    """
    if len(shapes.get(_PROJECTION, ())) == 4:
        return size(_PROJECTION, 3) or 1, size(_PROJECTION, 1)
    numbers = size(_PROJECTION, 1)
    if known and numbers % known**2 == 0:
        return known, numbers // known**2
    return max(1, math.isqrt(numbers // 3)), 3  # later checks of shapes refuse a wrong guess


def _grid_of_masks(skipped: Shapes) -> int | None:
    """Return the patches along a side of the image according to the shape of a mask in Microsoft's files, or None."""
    for name, shape in skipped.items():
        if (match := _MASK.fullmatch(name)) and len(shape) == 3:
            return math.isqrt(shape[0]) * math.isqrt(shape[1]) * 2 ** int(match[1])
    return None


def _grid_of_windows(place: object, windows: Sequence[int]) -> int | None:
    """Return the patches along a side of the image if a stage has a smaller window, which has all its tokens.

    Raises DataError if another stage contradicts that.
    """
    small = next((stage for stage, window in enumerate(windows) if window < max(windows)), None)
    if small is None:
        return None
    grid = windows[small] * 2**small
    if [min(max(windows), grid >> stage) for stage in range(len(windows))] != list(windows):
        raise DataError(
            f"'{place}' has windows of {_listed(windows)} tokens in its stages: only models with one window size can "
            "be imported"
        )
    return grid


def _mlp_ratio(width: int, hidden: Sequence[int]) -> float:
    """Return the shortest ratio that gives the hidden features of each stage, or of the first one if none does."""
    exact = [features / max(1, width * 2**stage) for stage, features in enumerate(hidden)]
    rounded = [round(each, digits) for digits in range(4) for each in exact]
    # The quotient may be rounded down, and its product with the width then to the next lower number.
    above = [math.nextafter(each, math.inf) for each in exact]

    def fits(ratio: float) -> bool:
        return all(int(width * 2**stage * ratio) == features for stage, features in enumerate(hidden))

    return next(filter(fits, [*rounded, *exact, *above]), exact[0])


def parts(tensors: Renamed, config: SwinConfig) -> dict[str, MappedParameter]:
    """Return how each parameter of vitpar is made of the tensors that were found, by vitpar's name.

    The result is not checked: parameters may be missing or superfluous, and shapes may differ from those of `config`.
    """
    made = {ours: MappedParameter((name,), tensors.shapes[ours]) for ours, name in tensors.names.items()}
    if tensors.format == "vitpar":
        return made
    for name, part in [*made.items()]:
        if name == _PROJECTION and len(part.shape) == 4:
            shape = (part.shape[0], math.prod(part.shape[1:]))
            made[name] = MappedParameter(part.names, shape, lambda kernel: kernel.flatten(1))
        elif name.endswith(_TABLE) and len(part.shape) == 2:
            offsets, heads = math.isqrt(part.shape[0]), part.shape[1]
            if offsets**2 == part.shape[0]:
                made[name] = MappedParameter(part.names, (heads, offsets, offsets), _heads_first)
        elif ".downsample." in name:
            made[name] = MappedParameter(part.names, part.shape, _feature_first)
    for stage in config.stages:
        for block in stage.blocks:
            _fuse_queries(made, f"blocks.{block}", stage.num_heads)
    return made


def _heads_first(table: Tensor) -> Tensor:
    """table: [offsets · offsets, heads]."""
    return rearrange(table, "(a b) h -> h a b", a=math.isqrt(table.shape[0]))


def _feature_first(merged: Tensor) -> Tensor:
    """merged: tensor whose last dimension has merged features, ordered (neighbour, feature)."""
    return rearrange(merged, "... (n c) -> ... (c n)", n=4)


def _fuse_queries(made: dict[str, MappedParameter], block: str, heads: int) -> None:
    """Reorder the rows of q, k and v, from one tensor or three, to (head, q|k|v, feature)."""

    def ordered(*tensors: Tensor) -> Tensor:
        return rearrange(torch.cat(tensors), "(three h d) ... -> (h three d) ...", three=3, h=heads)

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
