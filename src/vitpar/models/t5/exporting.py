"""Export of T5's parameters under transformers' names, with its configuration.

It undoes ``vitpar.models.t5.foreign``: what was exported can be imported again.
"""

from __future__ import annotations

from vitpar.errors import DataError
from vitpar.models.exporting import Tensors, alone
from vitpar.models.foreign import Exported, ExportedTensor
from vitpar.models.t5.config import TABLE, T5Config
from vitpar.models.text_foreign import separated


def exported(config: T5Config, format_name: str) -> Exported:
    """Return the model as ``transformers.T5ForConditionalGeneration`` has it. Raises DataError for timm."""
    if format_name != "transformers":
        raise DataError(
            f"{config.name} can be exported to transformers, but not to {format_name}: use --format transformers or "
            "vitpar"
        )
    c = config
    tensors = {"shared.weight": alone("embed.word_embeddings.weight")}
    for index in range(c.depth):
        tensors |= _block(c, f"encoder.block.{index}.layer", f"blocks.{index}", decodes=False)
    for index in range(c.decoder_depth):
        tensors |= _block(c, f"decoder.block.{index}.layer", f"blocks.{c.depth + 1 + index}", decodes=True)
    for stack, first in (("encoder", 0), ("decoder", c.depth + 1)):
        name = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        tensors[name] = ExportedTensor((f"blocks.{first}.{TABLE}",), lambda table: table[:, 0].T)
    tensors["encoder.final_layer_norm.weight"] = alone(f"{c.dec_embed}.norm.weight")
    tensors["decoder.final_layer_norm.weight"] = alone("head.norm.weight")
    if not c.tied:
        tensors["lm_head.weight"] = alone("head.fc.weight")
    return Exported(
        tensors,
        {
            "architectures": ["T5ForConditionalGeneration"],
            "model_type": "t5",
            "vocab_size": c.vocab_size,
            "d_model": c.embed_dim,
            "d_kv": c.head_dim,
            "d_ff": c.mlp_hidden_dim,
            "num_layers": c.depth,
            "num_decoder_layers": c.decoder_depth,
            "num_heads": c.num_heads,
            "relative_attention_num_buckets": c.num_buckets,
            "relative_attention_max_distance": c.max_distance,
            "dropout_rate": c.dropout,
            "layer_norm_epsilon": c.norm_eps,
            "feed_forward_proj": "relu" if c.gates == 1 else "gated-gelu",
            "tie_word_embeddings": c.tied,
            "is_encoder_decoder": True,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "decoder_start_token_id": 0,
        },
    )


def _block(c: T5Config, theirs: str, ours: str, *, decodes: bool) -> Tensors:
    last = 2 if decodes else 1
    tensors = separated(f"{ours}.attn.qkv.weight", (f"{theirs}.0.SelfAttention.{x}.weight" for x in "qkv"), c.num_heads)
    tensors[f"{theirs}.0.SelfAttention.o.weight"] = alone(f"{ours}.attn.proj.weight")
    if decodes:
        cross = f"{theirs}.1.EncDecAttention"
        tensors[f"{cross}.q.weight"] = alone(f"{ours}.cross_attn.q.weight")
        tensors |= separated(f"{ours}.cross_attn.kv.weight", (f"{cross}.{x}.weight" for x in "kv"), c.num_heads)
        tensors[f"{cross}.o.weight"] = alone(f"{ours}.cross_attn.proj.weight")
    for number in range(last + 1):
        tensors[f"{theirs}.{number}.layer_norm.weight"] = alone(f"{ours}.norm{number + 1}.weight")
    mlp, fc1 = f"{theirs}.{last}.DenseReluDense", f"{ours}.mlp.fc1.weight"
    if c.gates == 1:
        tensors[f"{mlp}.wi.weight"] = alone(fc1)
    else:
        tensors |= separated(fc1, (f"{mlp}.wi_0.weight", f"{mlp}.wi_1.weight"), c.mlp_hidden_dim)
    tensors[f"{mlp}.wo.weight"] = alone(f"{ours}.mlp.fc2.weight")
    return tensors
