"""T5's weights in transformers (``modeling_t5.py``, 4 and 5).

Blocks are numbered within encoder and decoder; vitpar numbers them through, with the decoder's embedding between, which
has the last norm of the encoder. Tables of biases by relative position are [buckets, heads], vitpar's
[heads, 1, buckets].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from vitpar.models.convert import Conversion, Exported, Sizes
from vitpar.models.description import block_name
from vitpar.models.rows import (
    GATES,
    SAME,
    ConfigKey,
    Found,
    Library,
    Packing,
    Row,
    heads,
    numbers,
    read_settings,
    row,
    settings_of,
)
from vitpar.models.t5.config import TABLE, T5Config

_WORDS, _LOGITS = "embed.word_embeddings.weight", "head.fc.weight"
_BIASES = Packing(lambda c, table: table.T[:, None], lambda c, table: table[:, 0].T)


def _rows(stack: str, mlp: int) -> tuple[Row, ...]:
    """Return the rows of the encoder or the decoder. mlp: number of the sublayer that is the MLP."""
    ours, theirs = f"{stack}.{{}}", f"{stack}.block.{{}}.layer"
    attention, dense = f"{theirs}.0.SelfAttention", f"{theirs}.{mlp}.DenseReluDense"
    return (
        row(f"{ours}.attn.qkv.weight", [f"{attention}.{x}.weight" for x in "qkv"], heads(3)),
        row(f"{ours}.attn.proj.weight", f"{attention}.o.weight"),
        row(f"{ours}.{TABLE}", f"{attention}.relative_attention_bias.weight", _BIASES),
        *(row(f"{ours}.norm{n + 1}.weight", f"{theirs}.{n}.layer_norm.weight") for n in range(mlp + 1)),
        row(
            f"{ours}.mlp.fc1.weight", [f"{dense}.wi_{n}.weight" for n in (0, 1)], GATES, written=lambda c: c.gates == 2
        ),
        row(f"{ours}.mlp.fc1.weight", f"{dense}.wi.weight"),
        row(f"{ours}.mlp.fc2.weight", f"{dense}.wo.weight"),
    )


_CROSS = "decoder.block.{}.layer.1.EncDecAttention"
_TRANSFORMERS = Library(
    r"encoder\.block\.0\.layer\.0\.SelfAttention\.q\.weight",
    (
        row(_WORDS, "shared.weight"),
        *_rows("encoder", 1),
        row("dec_embed.norm.weight", "encoder.final_layer_norm.weight"),
        *_rows("decoder", 2),
        row("decoder.{}.cross_attn.q.weight", f"{_CROSS}.q.weight"),
        row("decoder.{}.cross_attn.kv.weight", [f"{_CROSS}.{x}.weight" for x in "kv"], heads(2)),
        row("decoder.{}.cross_attn.proj.weight", f"{_CROSS}.o.weight"),
        row("head.norm.weight", "decoder.final_layer_norm.weight"),
        row(_LOGITS, "lm_head.weight"),
    ),
    needless=(
        (
            r"(?:encoder|decoder)\.embed_tokens\.weight"
            r"|decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
            "second copies of shared tensors are left out",
        ),
    ),
)
SETTINGS = (
    *numbers(vocab_size="vocab_size", d_model="embed_dim", d_kv="head_dim", d_ff="mlp_hidden_dim", num_layers="depth"),
    *numbers(num_decoder_layers="decoder_depth", num_heads="num_heads", layer_norm_epsilon="norm_eps"),
    *numbers(relative_attention_num_buckets="num_buckets", relative_attention_max_distance="max_distance"),
    ConfigKey("dropout_rate", "dropout", usual=0.1),
    ConfigKey("feed_forward_proj", "activation", {"relu": "relu", "gated-gelu": "geglu_tanh"}, usual="relu"),
)
"""Settings of transformers' config.json."""


class T5Weights(Conversion):
    """Conversion of T5's weights."""

    family = T5Config
    title = "a T5"
    libraries: ClassVar = {"transformers": _TRANSFORMERS}
    compared = (
        *("embed_dim", "depth", "decoder_depth", "num_heads", "head_dim", "mlp_hidden_dim", "vocab_size"),
        *("num_buckets", "activation", "tied"),
    )

    def read(self, said: Mapping[str, Any]) -> dict[str, Any]:
        # upstream: transformers 5 writes that all are tied, and apart from it whether outputs are scaled.
        tied = said.get("scale_decoder_outputs", said.get("tie_word_embeddings", True)) is not False
        return {**read_settings(said, SETTINGS), "tied": tied}

    def visible(self, size: Sizes, found: Found, known: Mapping[str, Any]) -> dict[str, Any]:
        table, hidden = f"encoder.0.{TABLE}", size("encoder.0.mlp.fc2.weight", 1)
        num_heads, gated = size(table, 1), size("encoder.0.mlp.fc1.weight", 0) == 2 * hidden
        return {
            "embed_dim": size(_WORDS, 1),
            "depth": found.count("encoder"),
            "decoder_depth": found.count("decoder"),
            "num_heads": num_heads,
            "head_dim": size("encoder.0.attn.proj.weight", 1) // max(1, num_heads),
            "mlp_hidden_dim": hidden,
            "vocab_size": size(_WORDS, 0),
            "num_buckets": size(table, 0),
            "activation": "geglu_tanh" if gated else "relu",
            # Version 1.1 is the one with gates and an output of its own; transformers 5 calls its outputs tied too.
            "tied": known.get("tied", _LOGITS not in size or not gated),
        }

    def special(self, found: Found, config: T5Config) -> tuple[Row, ...]:
        """Leave out a second copy of the word embeddings, or read it where they stand for a matrix that is not tied."""
        links = tuple(link for link in found.links if link.ours != (_LOGITS,) or not config.tied)
        if not config.tied and _LOGITS not in found.names and _WORDS in found.names:
            # upstream: transformers 5 may tie what it does not scale.
            return (*links, Row((_LOGITS,), found.names[_WORDS], SAME))
        return links

    def layers(self, config: T5Config) -> dict[str, str]:
        encoder = {f"encoder.{index}": block_name(index) for index in range(config.depth)}
        decoder = {f"decoder.{index}": block_name(config.depth + 1 + index) for index in range(config.decoder_depth)}
        return {**encoder, "dec_embed": config.dec_embed, **decoder}

    def export(self, config: T5Config, format_name: str) -> Exported:
        """Return the model as ``transformers.T5ForConditionalGeneration`` has it."""
        settings = {
            "architectures": ["T5ForConditionalGeneration"],
            "model_type": "t5",
            **settings_of(config, SETTINGS),
            "tie_word_embeddings": config.tied,
            "is_encoder_decoder": True,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "decoder_start_token_id": 0,
        }
        return Exported(self.tensors(config, format_name), settings)
