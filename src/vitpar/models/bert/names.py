"""BERT's weights in transformers (``modeling_bert.py``, 4 and 5).

The output's matrix is that of the word embeddings, and its bias has two names. Files made from Google's have norms with
``gamma`` and ``beta``. The pooler and next-sentence prediction are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from vitpar.models.bert.config import BertConfig
from vitpar.models.convert import Conversion, Exported, Sizes
from vitpar.models.rows import (
    TABLE,
    TRANSFORMERS,
    ConfigKey,
    Found,
    Library,
    heads,
    never,
    numbers,
    read_settings,
    row,
    settings_of,
)

_EMBEDDINGS, _LAYER, _HEAD = "bert.embeddings", "bert.encoder.layer.{}", "cls.predictions"
_SECOND_BIAS = f"{_HEAD}.decoder.bias"
_LEFT_OUT = "the pooler, next-sentence prediction and second copies of shared tensors are left out"
_TRANSFORMERS = Library(
    r"(?:bert\.)?embeddings\.token_type_embeddings\.weight",
    (
        row("embed.word_embeddings.weight", f"{_EMBEDDINGS}.word_embeddings.weight"),
        row("embed.pos_embed", f"{_EMBEDDINGS}.position_embeddings.weight", TABLE),
        row("embed.token_type_embeddings.weight", f"{_EMBEDDINGS}.token_type_embeddings.weight"),
        row("embed.norm.*", f"{_EMBEDDINGS}.LayerNorm.*"),
        row("blocks.{}.attn.qkv.*", [f"{_LAYER}.attention.self.{x}.*" for x in ("query", "key", "value")], heads(3)),
        row("blocks.{}.attn.proj.*", f"{_LAYER}.attention.output.dense.*"),
        row("blocks.{}.norm1.*", f"{_LAYER}.attention.output.LayerNorm.*"),
        row("blocks.{}.mlp.fc1.*", f"{_LAYER}.intermediate.dense.*"),
        row("blocks.{}.mlp.fc2.*", f"{_LAYER}.output.dense.*"),
        row("blocks.{}.norm2.*", f"{_LAYER}.output.LayerNorm.*"),
        row("head.dense.*", f"{_HEAD}.transform.dense.*"),
        row("head.norm.*", f"{_HEAD}.transform.LayerNorm.*"),
        row("head.fc.bias", f"{_HEAD}.bias"),
        row("head.fc.bias", _SECOND_BIAS, written=never),
    ),
    spellings=((r"^(?=embeddings\.|encoder\.)", "bert."), (r"\.gamma$", ".weight"), (r"\.beta$", ".bias")),
    needless=(
        (r"(?:bert\.)?embeddings\.position_ids", ""),
        (r"cls\.predictions\.decoder\.weight|(?:bert\.)?pooler\.dense\..+|cls\.seq_relationship\..+", _LEFT_OUT),
    ),
)
SETTINGS = (
    *TRANSFORMERS,
    *numbers(vocab_size="vocab_size", max_position_embeddings="positions", type_vocab_size="token_types"),
    ConfigKey("hidden_dropout_prob", "dropout", usual=0.1),
)
"""Settings of transformers' config.json."""


class BertWeights(Conversion):
    """Conversion of a BERT's weights."""

    family = BertConfig
    title = "a BERT"
    libraries: ClassVar = {"transformers": _TRANSFORMERS}
    compared = ("embed_dim", "depth", "num_heads", "mlp_hidden_dim", "vocab_size", "positions", "token_types")

    def visible(self, size: Sizes, found: Found, known: Mapping[str, Any]) -> dict[str, Any]:
        width, positions = size("embed.word_embeddings.weight", 1), size("embed.pos_embed", -2)
        return {
            "embed_dim": width,
            "depth": found.count("blocks"),
            "num_heads": known.get("num_heads", max(1, width // 64)),
            "mlp_hidden_dim": size("blocks.0.mlp.fc1.weight", 0),
            "vocab_size": size("embed.word_embeddings.weight", 0),
            "tokens": min(known["tokens"], positions) if "tokens" in known else positions,
            "positions": positions,
            "token_types": size("embed.token_type_embeddings.weight", 0),
        }

    def read(self, said: Mapping[str, Any]) -> dict[str, Any]:
        return read_settings(said, SETTINGS, {"hidden_act": "gelu", "position_embedding_type": "absolute"})

    def complete(self, found: Found) -> Found:
        """Leave out the second name of the output's bias where both are there."""
        unknown = tuple(name for name in found.unknown if name != _SECOND_BIAS)
        return found if unknown == found.unknown else replace(found, unknown=unknown, notes=(_LEFT_OUT,))

    def export(self, config: BertConfig, format_name: str) -> Exported:
        """Return the model as ``transformers.BertForMaskedLM`` has it."""
        return Exported(
            self.tensors(config, format_name),
            {
                "architectures": ["BertForMaskedLM"],
                "model_type": "bert",
                **settings_of(config, SETTINGS),
                "hidden_act": "gelu",
                "attention_probs_dropout_prob": config.dropout,
                "tie_word_embeddings": True,
            },
        )
