"""Random weights under the names of timm and transformers, in files as one downloads them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from helpers.converted import converted
from vitpar.weights.foreign import recognised

WIDTH, HEADS, DEPTH, HIDDEN, PATCH, SIZE, CLASSES = 24, 4, 2, 40, 4, 8, 7
PATCHES = (SIZE // PATCH) ** 2
TIMM_CONFIG = {"architecture": "vit_none", "model_args": {"num_heads": HEADS}}


def saved(folder: Path, state: dict[str, Tensor], config: dict[str, Any] | None = None) -> Path:
    """Write model.safetensors, and config.json if given, as in a downloaded folder. Return the folder."""
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def timm_state(
    *,
    cls: bool = True,
    dist: bool = False,
    registers: int = 0,
    embed_prefix: bool = True,
    qk_norm: bool = False,
    layer_scale: bool = False,
    head: bool = True,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Return a state dict with timm's names and shapes.

    embed_prefix: whether the tokens before the patches have position embeddings
    """
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, there in (("cls_token", cls), ("dist_token", dist)):
        shapes |= {name: (1, 1, WIDTH)} if there else {}
    shapes |= {"reg_token": (1, registers, WIDTH)} if registers else {}
    prefix = cls + dist + registers
    shapes["pos_embed"] = (1, PATCHES + prefix * embed_prefix, WIDTH)
    shapes |= {"patch_embed.proj.weight": (WIDTH, 3, PATCH, PATCH), "patch_embed.proj.bias": (WIDTH,)}
    for i in range(DEPTH):
        linears = {"attn.qkv": (3 * WIDTH, WIDTH), "attn.proj": (WIDTH, WIDTH)}
        linears |= {"mlp.fc1": (HIDDEN, WIDTH), "mlp.fc2": (WIDTH, HIDDEN)}
        for name, shape in linears.items():
            shapes |= {f"blocks.{i}.{name}.weight": shape, f"blocks.{i}.{name}.bias": shape[:1]}
        norms = {"norm1": WIDTH, "norm2": WIDTH}
        norms |= {"attn.q_norm": WIDTH // HEADS, "attn.k_norm": WIDTH // HEADS} if qk_norm else {}
        for name, width in norms.items():
            shapes |= {f"blocks.{i}.{name}.weight": (width,), f"blocks.{i}.{name}.bias": (width,)}
        if layer_scale:
            shapes |= {f"blocks.{i}.ls1.gamma": (WIDTH,), f"blocks.{i}.ls2.gamma": (WIDTH,)}
    shapes |= {"norm.weight": (WIDTH,), "norm.bias": (WIDTH,)}
    for name in [*(["head"] if head else []), *(["head_dist"] if dist and head else [])]:
        shapes |= {f"{name}.weight": (CLASSES, WIDTH), f"{name}.bias": (CLASSES,)}
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def as_transformers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under the names of transformers' ViT or DeiT, as the export writes them."""
    family, found = recognised("timm", {name: tuple(tensor.shape) for name, tensor in state.items()})
    config = family.infer_config("timm", found, {"num_heads": HEADS})
    ours = converted(state, config)
    made = family.exported(config, "transformers").tensors
    return {name: tensor.make(*(ours[one] for one in tensor.names)).clone() for name, tensor in made.items()}


def transformers_config(kind: str = "vit", **changed: Any) -> dict[str, Any]:
    """Return the settings of a transformers config.json."""
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": DEPTH, "image_size": SIZE}
    return {"model_type": kind, "hidden_act": "gelu", "layer_norm_eps": 1e-6, "patch_size": PATCH, **sizes, **changed}
