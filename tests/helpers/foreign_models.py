"""Models of timm and transformers, in the sizes of `foreign_weights`."""

from typing import Any

import torch
from torch import Tensor, nn

from helpers.foreign_weights import CLASSES, DEPTH, HEADS, HIDDEN, PATCH, SIZE, WIDTH, transformers_config
from helpers.oracles import timm, transformers
from vitpar.models.swin.config import SwinConfig


def timm_model(state: dict[str, Tensor], pool: str = "cls") -> nn.Module:
    """Return timm's VisionTransformer, or its distilled variant, with the weights `state`, in evaluation mode.

    pool: "cls" for the class token, "avg" for the mean over patches after the norm
    """
    registers = state["reg_token"].shape[1] if "reg_token" in state else 0
    prefix = sum(name in state for name in ("cls_token", "dist_token")) + registers
    options = {
        "img_size": SIZE,
        "patch_size": PATCH,
        "num_classes": CLASSES,
        "embed_dim": WIDTH,
        "depth": DEPTH,
        "num_heads": HEADS,
        "mlp_ratio": HIDDEN / WIDTH,
        "qk_norm": "blocks.0.attn.q_norm.weight" in state,
        "init_values": 1.0 if "blocks.0.ls1.gamma" in state else None,
    }
    if "dist_token" in state:
        model = timm.models.deit.VisionTransformerDistilled(**options)
    else:
        model = timm.models.vision_transformer.VisionTransformer(
            **options,
            class_token="cls_token" in state,
            reg_tokens=registers,
            no_embed_class=state["pos_embed"].shape[1] == (SIZE // PATCH) ** 2 and prefix > 0,
            global_pool={"cls": "token"}.get(pool, pool),
            fc_norm=False,
        )
    model.load_state_dict(state)
    return model.eval()


def timm_logits(state: dict[str, Tensor], images: Tensor, pool: str = "cls") -> Tensor:
    """Return timm's logits [batch, classes] for images [batch, 3, size, size]."""
    with torch.no_grad():
        return timm_model(state, pool)(images)


def transformers_model(kind: str, teacher: bool = False, **changed: Any) -> nn.Module:
    """Return transformers' "vit" or "deit" image classifier with random weights, in evaluation mode.

    teacher: whether a DeiT also has the classifier of the distillation token
    changed: settings of its config.json
    """
    sizes = {name: value for name, value in transformers_config(kind, **changed).items() if name != "model_type"}
    sizes |= {"intermediate_size": HIDDEN, "num_labels": CLASSES}
    if kind == "vit":
        return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes)).eval()
    classes = {True: transformers.DeiTForImageClassificationWithTeacher, False: transformers.DeiTForImageClassification}
    return classes[teacher](transformers.DeiTConfig(**sizes)).eval()


def new_timm_swin(config: SwinConfig) -> nn.Module:
    """Return timm's Swin Transformer with its initial values."""
    model: nn.Module = timm.models.swin_transformer.SwinTransformer(
        img_size=config.image_size,
        patch_size=config.patch_size,
        in_chans=config.channels,
        num_classes=config.num_classes,
        embed_dim=config.embed_dim,
        depths=config.depths,
        num_heads=config.num_heads,
        window_size=config.window_size,
        mlp_ratio=config.mlp_ratio,
        drop_path_rate=config.drop_path,
    )
    return model


def timm_swin(config: SwinConfig) -> nn.Module:
    """Return timm's Swin Transformer with random values of every parameter, in evaluation mode."""
    torch.manual_seed(0)
    return randomised(new_timm_swin(config))


@torch.no_grad()
def randomised(model: nn.Module) -> nn.Module:
    """Draw every parameter anew and return the model, in evaluation mode."""
    for name, parameter in model.named_parameters():  # initial biases, norms and tables hide mistakes
        weight = parameter.dim() > 1 and "table" not in name
        std = parameter[0].numel() ** -0.5 if weight else 0.5
        parameter.normal_(std=std)
        if "norm" in name and name.endswith("weight"):
            parameter.add_(1)
    return model.eval()
