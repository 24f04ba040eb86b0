"""Names of a Vision Transformer's tensors in other libraries, by format: regular expressions, and names in vitpar.

- **timm**: ``vision_transformer.py``, ``deit.py`` and ``eva.py`` (1.0), which includes the files of DeiT, DeiT III, the
  original ViT and ViT-5 (github.com/wangf3014/ViT-5).
- **transformers**: ViT, DeiT, DINOv2 with and without registers, DINOv3 and the image towers of SigLIP (4 and 5).
- **vitpar**: its own.

Parts that vitpar fuses have their own names here: ``attn.q``, ``mlp.gate``, ``mlp.value``, ``attn_out``, ``mlp_out``.
"""

from __future__ import annotations

from vitpar.models.foreign import Patterns

_END = r"(\.weight|\.bias)"
_MODEL = r"(?:vit\.|deit\.|dinov2\.|dinov2_with_registers\.|dinov3_vit\.|vision_model\.|model\.)?"
_BLOCK = rf"{_MODEL}(?:encoder\.layers?|model\.layer|layers?)\.(\d+)\."
_EMBEDDINGS = rf"{_MODEL}embeddings\."
_POOL = rf"{_MODEL}head\."

FORMATS: dict[str, Patterns] = {
    "vitpar": (("((?:embed|blocks|head)\\..+)", r"\1"),),
    "timm": (
        (rf"patch_embed\.proj{_END}", r"embed.patch_embed.proj\1"),
        (r"(cls_token|dist_token|reg_token|pos_embed)", r"embed.\1"),
        (r"blocks\.(\d+)\.(?:ls([12])\.gamma|gamma_([12]))", r"blocks.\1.ls\2\3.gamma"),
        (r"blocks\.(\d+)\.ls\.gamma", r"blocks.\1.ls1.gamma"),
        (rf"(blocks\.\d+\.(?:norm[12]|attn\.(?:qkv|proj|q_norm|k_norm|norm)|mlp\.(?:fc[12]|norm))){_END}", r"\1\2"),
        (r"(blocks\.\d+\.attn\.[qv]_bias)", r"\1"),
        (rf"blocks\.(\d+)\.attn\.([qkv])_proj{_END}", r"blocks.\1.attn.\2\3"),
        (rf"blocks\.(\d+)\.mlp\.fc1_g{_END}", r"blocks.\1.mlp.gate\2"),
        (rf"blocks\.(\d+)\.mlp\.fc1_x{_END}", r"blocks.\1.mlp.value\2"),
        (rf"blocks\.(\d+)\.in_norm{_END}", r"blocks.\1.norm1\2"),
        (rf"(blocks\.\d+\.(?:in_proj|out_proj|q_norm|k_norm)){_END}", r"\1\2"),
        (r"(blocks\.\d+\.mlp_bias)", r"\1"),
        (rf"blocks\.(\d+)\.(attn|mlp)_out_proj{_END}", r"blocks.\1.\2_out\3"),
        (rf"(?:fc_)?norm{_END}", r"head.norm\1"),
        (rf"(attn_pool\.(?:q|kv|proj|norm|mlp\.fc[12])){_END}", r"head.\1\2"),
        (r"attn_pool\.latent", "head.attn_pool.latent"),
        (rf"pre_logits\.fc{_END}", r"head.representation\1"),
        (rf"head{_END}", r"head.fc\1"),
        (rf"head_dist{_END}", r"head.fc_dist\1"),
    ),
    "transformers": (
        (rf"{_EMBEDDINGS}patch_embeddings?(?:\.projection)?{_END}", r"embed.patch_embed.proj\1"),
        (rf"{_EMBEDDINGS}cls_token", "embed.cls_token"),
        (rf"{_EMBEDDINGS}distillation_token", "embed.dist_token"),
        (rf"{_EMBEDDINGS}register_tokens", "embed.reg_token"),
        (rf"{_EMBEDDINGS}position_embeddings?(?:\.weight)?", "embed.pos_embed"),
        (rf"{_BLOCK}(?:layernorm_before|norm1|layer_norm1){_END}", r"blocks.\1.norm1\2"),
        (rf"{_BLOCK}(?:layernorm_after|norm2|layer_norm2){_END}", r"blocks.\1.norm2\2"),
        (
            rf"{_BLOCK}(?:attention|self_attn)\.(?:attention\.)?([qkv])(?:uery|ey|alue|_proj){_END}",
            r"blocks.\1.attn.\2\3",
        ),
        (rf"{_BLOCK}(?:attention|self_attn)\.(?:output\.dense|o_proj|out_proj){_END}", r"blocks.\1.attn.proj\2"),
        (rf"{_BLOCK}layer_scale([12])\.lambda1", r"blocks.\1.ls\2.gamma"),
        (rf"{_BLOCK}mlp\.gate_proj{_END}", r"blocks.\1.mlp.gate\2"),
        (rf"{_BLOCK}mlp\.weights_in{_END}", r"blocks.\1.mlp.fc1\2"),
        (rf"{_BLOCK}(?:intermediate\.dense|mlp\.fc1|mlp\.up_proj){_END}", r"blocks.\1.mlp.fc1\2"),
        (rf"{_BLOCK}(?:output\.dense|mlp\.fc2|mlp\.down_proj|mlp\.weights_out){_END}", r"blocks.\1.mlp.fc2\2"),
        (rf"{_MODEL}(?:layernorm|norm|post_layernorm){_END}", r"head.norm\1"),
        (rf"{_POOL}probe", "head.attn_pool.latent"),
        (rf"{_POOL}attention\.in_proj_(weight|bias)", r"head.attn_pool.in_proj.\1"),
        (rf"{_POOL}attention\.out_proj{_END}", r"head.attn_pool.proj\1"),
        (rf"{_POOL}layernorm{_END}", r"head.attn_pool.norm\1"),
        (rf"{_POOL}(mlp\.fc[12]){_END}", r"head.attn_pool.\1\2"),
        (rf"(?:cls_)?classifier{_END}", r"head.fc\1"),
        (rf"distillation_classifier{_END}", r"head.fc_dist\1"),
    ),
}
"""Patterns of names by format."""
MARKS = {
    "vitpar": r"embed\.patch_embed\.proj\.weight",
    "timm": r"patch_embed\.proj\.weight",
    "transformers": rf"{_EMBEDDINGS}patch_embeddings?(?:\.projection)?\.weight",
}
"""Name of the patch projection, which identifies a format."""
NEEDLESS: dict[str, tuple[tuple[str, str], ...]] = {
    "timm": (
        (r"blocks\.\d+\.attn\.rope(?:_reg)?\.freqs", ""),
        (r"mask_token", "the mask token is dropped: it is for pretraining only"),
        (r"decoder_.*|decoder\..*", "the decoder is dropped: it is for pretraining only"),
    ),
    "transformers": (
        (
            rf"{_MODEL}pooler\.dense\.(?:weight|bias)",
            "the pooler is dropped, since no classifier of transformers uses it",
        ),
        (rf"{_EMBEDDINGS}mask_token", "the mask token is dropped: it is for pretraining only"),
        (r"decoder\..*", "the decoder is dropped: it is for pretraining only"),
        (r"text_model\..*|logit_(?:scale|bias)", "the text tower is dropped: only the image tower is imported"),
        (rf"{_EMBEDDINGS}position_ids|{_MODEL}rope_embeddings\.inv_freq", ""),
    ),
}
"""Patterns of tensors that are no parameters here, by format, and a sentence for the user or ""."""
