"""Models for self-distillation: crops as the backbone computes each, heads, masks, names, refusals."""

import colorsys
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.converted import filled
from helpers.dino_models import dino
from vitpar.data.randomness import Draws
from vitpar.data.transforms.operations import CHANGES
from vitpar.data.transforms.policies import Distortions
from vitpar.errors import ModelError
from vitpar.models import model_config
from vitpar.models.dino.config import DINOConfig
from vitpar.models.families import config_from_json, config_to_json
from vitpar.models.layers import LayeredModel
from vitpar.models.lora import adapted
from vitpar.tasks.block_masks import block_masks

KEYS = torch.arange(1, 6) * 1_000_003
CASES: dict[str, dict[str, Any]] = {
    "usual": {},
    "registers, rotary positions, gates": {
        **{"num_reg_tokens": 4, "position": "none", "rope": "dinov3", "rope_temperature": 100.0, "embed_dim": 32},
        "activation": "swiglu",
    },
    "layer scale, own head of patches": {"layer_scale": 0.1, "patch_head": True, "qkv_bias": "qv"},
    "no local crops": {"local_crops": 0},
}


def test_adapters_have_the_rate_of_what_they_adapt() -> None:
    config, name = adapted(dino(), 2, 4.0), "blocks.0.attn.qkv.lora_A.weight"
    assert name in {f"blocks.0.{name}" for name in config.layers["blocks.0"].parameters}
    assert (config.rate_part(name), config.rate_part("head.class_head.mlp1.weight")) == ("backbone", "heads")
    assert (config.clip_part(name), config.clip_part("head.class_head.fc.weight")) == ("backbone", "class_head")


@pytest.mark.parametrize("case", CASES)
def test_outputs_are_those_of_the_backbone_on_each_crop(case: str) -> None:
    config = dino(**CASES[case])
    model = filled(config, dtype=torch.float64)
    masks = torch.from_numpy(block_masks(KEYS.numpy(), range(5), 4))
    assert masks.any() and not masks.all()
    pixels = torch.randn(5, *config.input.shape).double()
    outputs = model(pixels, masks=masks)
    assert outputs.shape == (5, *config.output_shape)
    expected, features, start = list[list[Tensor]](), list[Tensor](), 0
    for crops in config.crops:
        for number in range(crops.count):
            images = pixels[:, :, start : start + crops.size**2].unflatten(2, (crops.size, crops.size))
            start += crops.size**2
            hidden = masks[:, number] if crops == config.crops[0] else None
            tokens = F.layer_norm(of_backbone(model, config, images, hidden), [config.embed_dim], eps=config.norm_eps)
            norm = model.get_submodule("head.norm")
            tokens = tokens * norm.weight + norm.bias  # type: ignore[operator]
            features.append(tokens[:, 0])
            expected.append([scored(model, "class_head", tokens[:, 0])])
            if hidden is not None:
                head = "patch_head" if config.patch_head else "class_head"
                for image, patches in enumerate(tokens[:, config.prefix_tokens :]):
                    expected[-1].append(scored(model, head, patches[hidden[image]]))
    classes = torch.stack([one[0] for one in expected], dim=1)
    torch.testing.assert_close(outputs[:, : len(expected)], classes, rtol=1e-10, atol=1e-10)
    for crop in range(2):
        for image, patches in enumerate(expected[crop][1:]):
            begin = len(expected) + crop * config.slots
            found = outputs[image, begin : begin + len(patches)]
            torch.testing.assert_close(found, patches, rtol=1e-10, atol=1e-10)
    padded = F.pad(torch.stack(features[:2], dim=1), (0, config.num_classes - config.embed_dim))
    torch.testing.assert_close(outputs[:, -2:], padded, rtol=1e-10, atol=1e-10)
    with torch.device("meta"):
        teacher, student = (dict(LayeredModel(one).named_parameters()) for one in (config.of_teacher, config))
    assert {name: p.shape for name, p in teacher.items()} == {name: p.shape for name, p in student.items()}


def of_backbone(model: LayeredModel, config: DINOConfig, images: Tensor, masks: Tensor | None) -> Tensor:
    """Return the tokens that the backbone's own layers make of one crop, with mask tokens in the places of `masks`."""
    from dataclasses import replace

    sized = replace(config.backbone, image_size=images.shape[-1]) if config.rope != "none" else config.backbone
    plain = LayeredModel(sized, [name for name in sized.layer_names if name != "head"]).double().eval()
    for layer in plain.layers().values():
        layer.reset_buffers()
    plain.double()
    plain.load_state_dict(model.state_dict(), strict=False)
    embed = plain.layers()["embed"]
    if masks is not None:
        token = model.get_parameter("embed.mask_token")
        embed.patch_embed.register_forward_hook(lambda _, __, x: torch.where(masks[..., None], token, x))  # type: ignore[union-attr, operator]
    return plain(images)  # type: ignore[no-any-return]


def scored(model: LayeredModel, head: str, tokens: Tensor) -> Tensor:
    """Return scores of prototypes as torch's weight norm computes them."""
    given = {name.removeprefix(f"head.{head}."): p for name, p in model.named_parameters() if f".{head}." in name}
    x = F.gelu(F.linear(tokens, given["mlp1.weight"], given["mlp1.bias"]))
    x = F.gelu(F.linear(x, given["mlp2.weight"], given["mlp2.bias"]))
    x = F.linear(x, given["mlp3.weight"], given["mlp3.bias"])
    weight = torch._weight_norm(given["fc.weight"], given["lengths.weight"][:, None], 0)
    return (x / x.norm(dim=-1, keepdim=True)) @ weight.T


def test_masks_depend_on_keys_alone_and_have_exact_sizes() -> None:
    keys = torch.randint(0, 2**62, (64,), generator=torch.Generator().manual_seed(0)).numpy()
    whole = block_masks(keys, range(64), 14)
    counts = np.sort(whole.sum(-1).ravel())
    assert (counts[:64] == 0).all() and counts[64:].tolist() == [int(196 * r) for r in np.linspace(0.1, 0.5, 65)[1:]]
    some = block_masks(keys, [3, 40], 14)
    assert (some[[3, 40]] == whole[[3, 40]]).all() and not np.delete(some, [3, 40], axis=0).any()
    # Neighbours of a masked patch are masked more often than patches are.
    grids = whole[whole.any(-1)].reshape(-1, 14, 14)
    assert (grids[:, 1:] & grids[:, :-1]).mean() > 1.5 * grids.mean() ** 2


def test_hue_turns_as_in_colorsys_and_distortions_have_their_probabilities() -> None:
    images = torch.randint(0, 256, (3, 3, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images[0, :, 0] = 77  # grey has no hue
    turns = torch.tensor([-0.1, 0.03, 0.1], dtype=torch.float64)
    found = CHANGES["Hue"](None, images, turns).double()
    for image, turn, turned in zip(images, turns.tolist(), found, strict=True):
        for pixel, new in zip(image.flatten(1).T.tolist(), turned.flatten(1).T.tolist(), strict=True):
            hue, saturation, value = colorsys.rgb_to_hsv(*(level / 255 for level in pixel))
            expected = colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value)
            assert new == pytest.approx([255 * level for level in expected], abs=0.51)
    counts = Counter[str]()
    for step in Distortions(blur=0.9, solarize=0.2).steps(Draws(np.arange(4000)), 8):
        for name, (rows, _) in step.items():
            counts[name] += len(rows)
    shares = {name: counts[name] / 4000 for name in ("Hue", "Contrast", "Grayscale", "GaussianBlur", "Solarize")}
    expected = {"Hue": 0.8, "Contrast": 0.8, "Grayscale": 0.2, "GaussianBlur": 0.9, "Solarize": 0.2}
    assert shares == pytest.approx(expected, abs=0.03)


def test_names_options_and_refusals() -> None:
    config = model_config("dino_vit_small_patch14_reg4_dinov2", image_size=224, num_classes=4096)
    assert isinstance(config, DINOConfig)
    assert (config.local_size, config.num_classes, config.backbone.embed_dim) == (98, 4096, 384)
    assert config.pretrained[0] == config.backbone and config.tokens == 2 * (5 + 256) + 8 * (5 + 49)
    assert config_from_json(config_to_json(config)) == config
    for options, words in (
        ({"pool": "avg"}, "needs pool 'cls'"),
        ({"local_size": 9}, "local_size of dino_vit_custom is 9: it must be a multiple of patch_size 4"),
        ({"parallel_blocks": True}, "has parallel blocks, which do not know crops"),
        ({"local_crops": 65}, "local_crops of dino_vit_custom is 65: it must be at most 64"),
    ):
        with pytest.raises(ModelError, match=words):
            dino(**options)
