"""Export of BERT's parameters under transformers' names, with its configuration.

It undoes ``vitpar.models.bert.foreign``: what was exported can be imported again.
"""

from __future__ import annotations

from vitpar.errors import DataError
from vitpar.models.bert.config import BertConfig
from vitpar.models.exporting import alone, linear
from vitpar.models.foreign import Exported, ExportedTensor
from vitpar.models.text_foreign import separated


def exported(config: BertConfig, format_name: str) -> Exported:
    """Return the model as ``transformers.BertForMaskedLM`` has it. Raises DataError for timm."""
    if format_name != "transformers":
        raise DataError(
            f"{config.name} can be exported to transformers, but not to {format_name}: use --format transformers or "
            "vitpar"
        )
    c, embeddings, predictions = config, "bert.embeddings", "cls.predictions"
    tensors = {
        f"{embeddings}.word_embeddings.weight": alone("embed.word_embeddings.weight"),
        f"{embeddings}.position_embeddings.weight": ExportedTensor(("embed.pos_embed",), lambda table: table[0]),
        f"{embeddings}.token_type_embeddings.weight": alone("embed.token_type_embeddings.weight"),
        **linear(f"{embeddings}.LayerNorm", "embed.norm"),
    }
    for index, ours in enumerate(c.blocks):
        theirs = f"bert.encoder.layer.{index}"
        for end in ("weight", "bias"):
            names = (f"{theirs}.attention.self.{word}.{end}" for word in ("query", "key", "value"))
            tensors |= separated(f"{ours}.attn.qkv.{end}", names, c.num_heads)
        tensors |= linear(f"{theirs}.attention.output.dense", f"{ours}.attn.proj")
        tensors |= linear(f"{theirs}.attention.output.LayerNorm", f"{ours}.norm1")
        tensors |= linear(f"{theirs}.intermediate.dense", f"{ours}.mlp.fc1")
        tensors |= linear(f"{theirs}.output.dense", f"{ours}.mlp.fc2")
        tensors |= linear(f"{theirs}.output.LayerNorm", f"{ours}.norm2")
    tensors |= linear(f"{predictions}.transform.dense", "head.dense")
    tensors |= linear(f"{predictions}.transform.LayerNorm", "head.norm")
    tensors[f"{predictions}.bias"] = alone("head.fc.bias")
    return Exported(
        tensors,
        {
            "architectures": ["BertForMaskedLM"],
            "model_type": "bert",
            "vocab_size": c.vocab_size,
            "hidden_size": c.embed_dim,
            "num_hidden_layers": c.depth,
            "num_attention_heads": c.num_heads,
            "intermediate_size": c.mlp_hidden_dim,
            "max_position_embeddings": c.positions,
            "type_vocab_size": c.token_types,
            "layer_norm_eps": c.norm_eps,
            "hidden_act": "gelu",
            "hidden_dropout_prob": c.dropout,
            "attention_probs_dropout_prob": c.dropout,
            "tie_word_embeddings": True,
        },
    )
