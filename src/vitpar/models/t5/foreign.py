"""Conversion of T5's parameters from transformers (``modeling_t5.py``, 4 and 5) and vitpar's own format.

The tensors of transformers differ as follows:

- Blocks are numbered within encoder and decoder; vitpar numbers them through, with the decoder's embedding between.
- Queries, keys and values are separate; vitpar has rows ordered (head, q|k|v, feature), or (head, k|v, feature) where
  the decoder attends to the encoder. Gates and values of the MLP alternate in vitpar.
- The tables of biases by relative position are [buckets, heads], vitpar's [heads, 1, buckets].
- The last norm of the encoder is in vitpar's embedding of the decoder.
"""

from __future__ import annotations

import re

from torch import Tensor

from vitpar.errors import DataError, ModelError
from vitpar.models.families import model_config
from vitpar.models.foreign import MappedParameter, Patterns, Renamed, Shapes, dimension, format_of
from vitpar.models.t5.config import TABLE, T5Config
from vitpar.models.text_foreign import VITPAR, TextHints, fuse, num_blocks, refuse_other_fields, renamed_by

_BLOCK = r"(encoder|decoder)\.block\.(\d{1,4})\.layer\."
_OURS = r"\1.\2."
# In this order: the encoder's last sublayer is numbered 1, the decoder's 2.
FORMATS: dict[str, Patterns] = {
    "vitpar": VITPAR,
    "transformers": (
        (r"shared\.weight", "embed.word_embeddings.weight"),
        (rf"{_BLOCK}0\.SelfAttention\.([qkv])\.weight", rf"{_OURS}attn.\3.weight"),
        (rf"{_BLOCK}0\.SelfAttention\.o\.weight", rf"{_OURS}attn.proj.weight"),
        (rf"{_BLOCK}0\.SelfAttention\.relative_attention_bias\.weight", rf"{_OURS}{TABLE}"),
        (rf"{_BLOCK}0\.layer_norm\.weight", rf"{_OURS}norm1.weight"),
        (rf"{_BLOCK}1\.EncDecAttention\.([qkv])\.weight", rf"{_OURS}cross_attn.\3.weight"),
        (rf"{_BLOCK}1\.EncDecAttention\.o\.weight", rf"{_OURS}cross_attn.proj.weight"),
        (rf"{_BLOCK}1\.layer_norm\.weight", rf"{_OURS}norm2.weight"),
        (rf"{_BLOCK}2\.layer_norm\.weight", rf"{_OURS}norm3.weight"),
        (rf"{_BLOCK}[12]\.DenseReluDense\.(wi_[01])\.weight", rf"{_OURS}mlp.\3.weight"),
        (rf"{_BLOCK}[12]\.DenseReluDense\.wi\.weight", rf"{_OURS}mlp.fc1.weight"),
        (rf"{_BLOCK}[12]\.DenseReluDense\.wo\.weight", rf"{_OURS}mlp.fc2.weight"),
        (r"encoder\.final_layer_norm\.weight", "dec_embed.norm.weight"),
        (r"decoder\.final_layer_norm\.weight", "head.norm.weight"),
        (r"lm_head\.weight", "head.fc.weight"),
    ),
}
"""Patterns of names by format. Their templates give the stack of a block, which `renamed` numbers through."""
MARKS = {"vitpar": rf"blocks\.0\.{TABLE}", "transformers": r"encoder\.block\.0\.layer\.0\.SelfAttention\.q\.weight"}
"""Name that identifies the family and the format."""
SKIPPED = re.compile(
    r"(?:encoder|decoder)\.embed_tokens\.weight"
    r"|decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
)
"""Names of tensors that vitpar's model does not need: copies of the word embeddings, and a table that no T5 uses."""
_COMPARED = (
    *("embed_dim", "depth", "decoder_depth", "num_heads", "head_dim", "mlp_hidden_dim", "vocab_size", "num_buckets"),
    *("activation", "tied"),
)


def renamed(shapes: Shapes) -> Renamed | None:
    """Recognise the format of foreign tensors and map their names to vitpar's; None for another family's tensors."""
    format_name = format_of(MARKS, shapes)
    if format_name is None:
        return None
    note = "second copies of shared tensors are left out"
    found = renamed_by(format_name, shapes, FORMATS[format_name], SKIPPED, note)
    if format_name == "vitpar":
        return found
    encoder = num_blocks(found.names, r"encoder\.(\d+)\.")

    def numbered(name: str) -> str:
        stack, _, rest = name.partition(".")
        if stack == "dec_embed":
            return f"blocks.{encoder}.{rest}"
        number, _, rest = rest.partition(".") if stack in ("encoder", "decoder") else ("", "", "")
        return f"blocks.{int(number) + (encoder + 1) * (stack == 'decoder')}.{rest}" if number else name

    names = {numbered(name): foreign for name, foreign in found.names.items()}
    ours = {numbered(name): shape for name, shape in found.shapes.items()}
    return Renamed(format_name, names, ours, found.unknown, found.skipped, found.notes)


def infer_config(place: object, tensors: Renamed, hints: TextHints, model: str | None = None) -> T5Config:
    """Return the configuration of the model.

    place: origin of the tensors, for messages.
    model: name of the model, for settings that neither tensors nor hints give; None if not named.

    Raises DataError for tensors that are not those of a T5 or that contradict the name.
    Raises ModelError for an unknown name.
    """
    named = model_config(model) if model is not None else None
    if named is not None and not isinstance(named, T5Config):
        raise DataError(f"'{place}' is a T5, not a {model}: name another model, or omit --model")
    shapes, ours = tensors.shapes, tensors.format == "vitpar"

    def size(name: str, dim: int) -> int:
        return dimension(place, shapes, name, dim, "a T5")

    words, table = "embed.word_embeddings.weight", f"blocks.0.{TABLE}"
    heads = size(table, 0 if ours else 1)
    inner = size("blocks.0.attn.proj.weight", 1)
    depth, every = _depths(shapes)
    gated = _gated(shapes, size("blocks.0.mlp.fc2.weight", 1))
    # Version 1.1 is the one with gates and an output of its own; transformers 5 calls its outputs tied too.
    tied = hints.text.get("tied", named.tied if named else "head.fc.weight" not in shapes or not gated)
    usual: T5Config | type[T5Config] = named or T5Config
    try:
        config = T5Config(
            name=model or "t5_custom",
            embed_dim=size(words, 1),
            depth=depth,
            decoder_depth=every - depth - 1,
            num_heads=heads,
            head_dim=inner // max(1, heads),
            mlp_hidden_dim=size("blocks.0.mlp.fc2.weight", 1),
            vocab_size=size(words, 0),
            tokens=hints.text.get("tokens", usual.tokens),
            decoder_tokens=hints.text.get("decoder_tokens", usual.decoder_tokens),
            num_buckets=size(table, 2 if ours else 0),
            max_distance=hints.text.get("max_distance", usual.max_distance),
            activation="geglu_tanh" if gated else "relu",
            tied=tied,
            norm_eps=usual.norm_eps if hints.norm_eps is None else hints.norm_eps,
            dropout=hints.text.get("dropout", T5Config.dropout),
        )
    except ModelError as error:
        raise DataError(f"'{place}' is not a vitpar model: {error}") from None
    if named is not None:
        refuse_other_fields(place, named.name, named, config, _COMPARED)
    return config


def _depths(shapes: Shapes) -> tuple[int, int]:
    """Return the number of the encoder's blocks and of all blocks.

    The embedding of the decoder is the first block without attention.
    """
    every = num_blocks(shapes, r"blocks\.(\d+)\.")
    attends = [any(f"blocks.{index}.attn.{name}.weight" in shapes for name in ("q", "qkv")) for index in range(every)]
    return (attends.index(False) if False in attends else every), every


def _gated(shapes: Shapes, hidden: int) -> bool:
    """Return whether the MLP has gates. hidden: its hidden features."""
    return "blocks.0.mlp.wi_0.weight" in shapes or shapes.get("blocks.0.mlp.fc1.weight", ())[:1] == (2 * hidden,)


def parts(tensors: Renamed, config: T5Config) -> dict[str, MappedParameter]:
    """Return how each parameter of vitpar is made of the tensors that were found, by vitpar's name.

    The result is not checked: parameters may be missing or superfluous, and shapes may differ from those of `config`.
    """
    made = {ours: MappedParameter((name,), tensors.shapes[ours]) for ours, name in tensors.names.items()}
    if tensors.format == "vitpar":
        return made
    if config.tied:
        made.pop("head.fc.weight", None)  # a second copy
    elif "embed.word_embeddings.weight" in made:  # upstream: transformers 5 may tie what it does not scale
        made.setdefault("head.fc.weight", made["embed.word_embeddings.weight"])
    for name, part in [*made.items()]:
        if name.endswith(TABLE) and len(part.shape) == 2:
            made[name] = MappedParameter(part.names, (part.shape[1], 1, part.shape[0]), _heads_first)
    for block in config.blocks:
        for name, letters in ((f"{block}.attn.qkv", "qkv"), (f"{block}.cross_attn.kv", "kv")):
            apart = tuple(f"{name.rpartition('.')[0]}.{letter}.weight" for letter in letters)
            fuse(made, f"{name}.weight", apart, config.num_heads)
        gates = (f"{block}.mlp.wi_0.weight", f"{block}.mlp.wi_1.weight")
        fuse(made, f"{block}.mlp.fc1.weight", gates, config.mlp_hidden_dim)
    return made


def _heads_first(table: Tensor) -> Tensor:
    """table: [buckets, heads]."""
    return table.T[:, None]
