"""Conversion of BERT's parameters from transformers (``modeling_bert.py``, 4 and 5) and vitpar's own format.

The tensors of transformers differ as follows:

- Queries, keys and values are separate; vitpar has them in one matrix with rows ordered (head, q|k|v, feature).
- Positions are [positions, width], vitpar's [1, positions, width].
- The output's matrix is that of the word embeddings, and its bias has two names.
- Files made from Google's have norms with ``gamma`` and ``beta``.

The pooler and next-sentence prediction are left out.
"""

from __future__ import annotations

import re
from dataclasses import replace

from vitpar.errors import DataError, ModelError
from vitpar.models.bert.config import BertConfig
from vitpar.models.families import model_config
from vitpar.models.foreign import MappedParameter, Patterns, Renamed, Shapes, dimension, format_of
from vitpar.models.text_foreign import VITPAR, TextHints, fuse, num_blocks, refuse_other_fields, renamed_by

_EMBEDDINGS = r"(?:bert\.)?embeddings\."
_LAYER = r"(?:bert\.)?encoder\.layer\.(\d{1,4})\."
_HEAD = r"cls\.predictions\."
_END = r"\.(weight|bias)"


def _norms(theirs: str, ours: str) -> Patterns:
    """Return the patterns of a norm by new and old names. ours: template of its name."""
    return (
        (rf"{theirs}LayerNorm\.(?:weight|gamma)", f"{ours}.weight"),
        (rf"{theirs}LayerNorm\.(?:bias|beta)", f"{ours}.bias"),
    )


FORMATS: dict[str, Patterns] = {
    "vitpar": VITPAR,
    "transformers": (
        (rf"{_EMBEDDINGS}position_embeddings\.weight", "embed.pos_embed"),
        (rf"{_EMBEDDINGS}(word|token_type)_embeddings\.weight", r"embed.\1_embeddings.weight"),
        *_norms(_EMBEDDINGS, "embed.norm"),
        (rf"{_LAYER}attention\.self\.([qkv])(?:uery|ey|alue){_END}", r"blocks.\1.attn.\2.\3"),
        (rf"{_LAYER}attention\.output\.dense{_END}", r"blocks.\1.attn.proj.\2"),
        *_norms(rf"{_LAYER}attention\.output\.", r"blocks.\1.norm1"),
        (rf"{_LAYER}intermediate\.dense{_END}", r"blocks.\1.mlp.fc1.\2"),
        (rf"{_LAYER}output\.dense{_END}", r"blocks.\1.mlp.fc2.\2"),
        *_norms(rf"{_LAYER}output\.", r"blocks.\1.norm2"),
        (rf"{_HEAD}transform\.dense{_END}", r"head.dense.\1"),
        *_norms(rf"{_HEAD}transform\.", "head.norm"),
        (rf"{_HEAD}bias", "head.fc.bias"),
    ),
}
"""Patterns of names by format."""
MARKS = {
    "vitpar": r"embed\.token_type_embeddings\.weight",
    "transformers": rf"{_EMBEDDINGS}token_type_embeddings.weight",
}
"""Name of the embedding of token types, which identifies the family and the format."""
SKIPPED = re.compile(
    rf"{_EMBEDDINGS}position_ids|{_HEAD}decoder\.(?:weight|bias)|(?:bert\.)?pooler\.dense{_END}"
    rf"|cls\.seq_relationship{_END}"
)
"""Names of tensors that vitpar's model does not need."""
_SECOND_BIAS = "cls.predictions.decoder.bias"
_COMPARED = ("embed_dim", "depth", "num_heads", "mlp_hidden_dim", "vocab_size", "positions", "token_types")


def renamed(shapes: Shapes) -> Renamed | None:
    """Recognise the format of foreign tensors and map their names to vitpar's; None for another family's tensors."""
    format_name = format_of(MARKS, shapes)
    if format_name is None:
        return None
    note = "the pooler, next-sentence prediction and second copies of shared tensors are left out"
    found = renamed_by(format_name, shapes, FORMATS[format_name], SKIPPED, note)
    if "head.fc.bias" not in found.names and (shape := shapes.get(_SECOND_BIAS)):
        names = {**found.names, "head.fc.bias": _SECOND_BIAS}
        return replace(found, names=names, shapes={**found.shapes, "head.fc.bias": shape})
    return found


def infer_config(place: object, tensors: Renamed, hints: TextHints, model: str | None = None) -> BertConfig:
    """Return the configuration of the model.

    place: origin of the tensors, for messages.
    model: name of the model, for settings that neither tensors nor hints give; None if not named.

    Raises DataError for tensors that are not those of a BERT or that contradict the name.
    Raises ModelError for an unknown name.
    """
    named = model_config(model) if model is not None else None
    if named is not None and not isinstance(named, BertConfig):
        raise DataError(f"'{place}' is a BERT, not a {model}: name another model, or omit --model")

    def size(name: str, dim: int) -> int:
        return dimension(place, tensors.shapes, name, dim, "a BERT")

    width = size("embed.word_embeddings.weight", 1)
    heads = hints.heads or (named.num_heads if named else None) or max(1, width // 64)
    positions = size("embed.pos_embed", max(0, len(tensors.shapes.get("embed.pos_embed", ())) - 2))
    eps = BertConfig.norm_eps if hints.norm_eps is None else hints.norm_eps
    try:
        config = BertConfig(
            name=model or "bert_custom",
            embed_dim=width,
            depth=num_blocks(tensors.shapes, r"blocks\.(\d+)\."),
            num_heads=heads,
            mlp_hidden_dim=size("blocks.0.mlp.fc1.weight", 0),
            vocab_size=size("embed.word_embeddings.weight", 0),
            tokens=hints.text.get("tokens", min(named.tokens, positions) if named else positions),
            positions=positions,
            token_types=size("embed.token_type_embeddings.weight", 0),
            norm_eps=eps,
            dropout=hints.text.get("dropout", BertConfig.dropout),
        )
    except ModelError as error:
        raise DataError(f"'{place}' is not a vitpar model: {error}") from None
    if named is not None:
        refuse_other_fields(place, named.name, named, config, _COMPARED)
    return config


def parts(tensors: Renamed, config: BertConfig) -> dict[str, MappedParameter]:
    """Return how each parameter of vitpar is made of the tensors that were found, by vitpar's name.

    The result is not checked: parameters may be missing or superfluous, and shapes may differ from those of `config`.
    """
    made = {ours: MappedParameter((name,), tensors.shapes[ours]) for ours, name in tensors.names.items()}
    if tensors.format == "vitpar":
        return made
    position = made.get("embed.pos_embed")
    if position is not None and len(position.shape) == 2:
        made["embed.pos_embed"] = MappedParameter(position.names, (1, *position.shape), lambda table: table[None])
    for block in config.blocks:
        for end in ("weight", "bias"):
            q, k, v = (f"{block}.attn.{letter}.{end}" for letter in "qkv")
            fuse(made, f"{block}.attn.qkv.{end}", (q, k, v), config.num_heads)
    return made
