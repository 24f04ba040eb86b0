"""Masked autoencoders: outputs, losses and gradients of transformers, description, names, masks, refusals."""

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from helpers.converted import converted, error, filled, gradient_errors
from helpers.foreign_models import randomised
from helpers.mae_models import mae, twin
from vitpar.errors import ModelError
from vitpar.models import FAMILIES, model_config
from vitpar.models.families import config_from_json, config_to_json
from vitpar.models.mae.config import MAEConfig
from vitpar.models.mae.layers import masked, masking_noise, shuffled
from vitpar.tasks.mae import MAE

CASES: dict[str, MAEConfig] = {
    "usual": mae(),
    "grey images, half masked": mae(channels=1, mask_ratio=0.5, patch_size=2),
    "narrow encoder": mae(embed_dim=8, num_heads=2, decoder_embed_dim=48, decoder_depth=4, depth=1),
    "one visible patch": mae(mask_ratio=0.9, norm_eps=1e-12),
}
KEYS = torch.arange(1, 6) * 1_000_003


@pytest.mark.parametrize("norm_pix_loss", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_outputs_loss_and_gradients_match_transformers_in_float64(case: str, norm_pix_loss: bool) -> None:
    config = CASES[case]
    theirs = with_fixed_positions(twin(config, norm_pix_loss))
    ours = filled(config, converted(theirs.state_dict(), config), torch.float64).train()
    x = torch.randn(len(KEYS), config.channels, config.image_size, config.image_size).double()
    expected = theirs(x, noise=masking_noise(KEYS, config.patches))
    outputs, task = ours(x, KEYS), MAE(norm_pix_loss=norm_pix_loss)
    assert outputs.shape == (len(KEYS), *config.output_shape)
    assert torch.equal(masked(KEYS, config.patches, config.visible), expected.mask.bool())
    targets = task.local_targets(x, KEYS, config)
    loss = task.total(outputs, targets) / task.count(targets, len(KEYS))
    found = {"outputs": error(outputs, expected.logits), "loss": error(loss, expected.loss)}
    loss.backward()
    expected.loss.backward()
    found |= gradient_errors(ours, theirs)
    assert max(found.values()) <= 1e-10, found
    torch.testing.assert_close(task.reference_targets(x, KEYS, config), targets, equal_nan=True)
    torch.testing.assert_close(task.reference(outputs, targets).mean(), loss)
    sums = task.sums(outputs.detach(), targets)
    assert task.result(sums) == pytest.approx({"loss": loss.item()})


@torch.no_grad()
def with_fixed_positions(model: nn.Module) -> nn.Module:
    """Return the model in float64 with random values of all parameters but the fixed positions."""
    fixed = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    randomised(model)
    for name, value in fixed.items():
        model.get_parameter(name).copy_(value)
    return model.double()


def test_images_that_cannot_be_read_do_not_count() -> None:
    task, config = MAE(), mae()
    x, outputs = torch.randn(3, 3, 16, 16), torch.randn(3, *config.output_shape)
    targets = task.local_targets(x, KEYS[:3], config)
    targets[1] = float("nan")
    assert task.sums(outputs, targets)[0] == 2
    torch.testing.assert_close(
        task.total(outputs, targets), task.total(outputs[[0, 2]], targets[[0, 2]]), rtol=1e-6, atol=0
    )


def test_pictures_show_predicted_patches() -> None:
    """Perfect outputs give the image; outputs of 0 give the mean of each masked patch, or 0 without norm_pix_loss."""
    config, keys = mae(), torch.arange(3)
    images = torch.randn(3, 3, 16, 16).double()
    patches = images.unfold(2, 4, 4).unfold(3, 4, 4)  # [3, channels, 4, 4, p, p]
    means = patches.mean((1, 4, 5), keepdim=True).expand_as(patches).transpose(3, 4).reshape(images.shape)
    for normalised in (True, False):
        task = MAE(norm_pix_loss=normalised)
        targets = task.reference_targets(images, keys, config)
        hidden = task.pictures(targets, images, keys, config)["masked"].isnan()
        assert hidden[:, 0].sum().item() == 3 * 12 * 16 and not (hidden[0] == hidden[1]).all()
        perfect = task.pictures(targets, images, keys, config)["reconstruction"]
        torch.testing.assert_close(perfect, images)
        empty = task.pictures(torch.zeros_like(targets), images, keys, config)
        expected = torch.where(hidden, means if normalised else torch.zeros_like(images), images)
        torch.testing.assert_close(empty["reconstruction"], expected)


def test_masks_depend_on_the_samples_keys_only() -> None:
    keys = torch.arange(2000) * 1_000_003
    order = shuffled(keys, 49)
    assert torch.equal(order.sort(dim=1).values, torch.arange(49).expand(2000, -1))
    assert torch.equal(order[7:9], shuffled(keys[7:9], 49)) and len({tuple(row) for row in order.tolist()}) == 2000
    chosen = masked(keys, 49, 12)
    assert (chosen.sum(1) == 37).all()
    # Every patch is visible in 12/49 of the samples: within five deviations.
    assert ((~chosen).double().mean(0) - 12 / 49).abs().max() < 5 * (12 / 49 * 37 / 49 / 2000) ** 0.5
    model = filled(mae())
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(model(x), model(x, torch.zeros(2, dtype=torch.int64)))
    assert not torch.allclose(model(x), model(x, KEYS[:2]))


SIZES = {"mae_vit_base": 111_655_680, "mae_vit_large": 329_239_296, "mae_vit_huge": 656_613_964}
"""Parameters of the authors' models, without the fixed positions, which are parameters there."""


@pytest.mark.parametrize("name", FAMILIES["mae"].PUBLISHED)
def test_number_of_parameters_matches_transformers(name: str) -> None:
    config = model_config(name)
    assert isinstance(config, MAEConfig)
    with torch.device("meta"):
        theirs: nn.Module = twin(config)
    assert config.parameters == SIZES[name] == sum(p.numel() for p in theirs.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("mae_vit_base_patch16", {"patch_size": 16, "image_size": 224, "embed_dim": 768}),
        ("mae_vit_huge_patch14", {"patch_size": 14, "depth": 32}),
        ("mae_vit_huge", {"patch_size": 14, "decoder_embed_dim": 512, "decoder_depth": 8, "decoder_num_heads": 16}),
        ("mae_vit_large_patch8_32", {"patch_size": 8, "image_size": 32}),
    ],
)
def test_names(name: str, fields: Mapping[str, Any]) -> None:
    config = model_config(name, num_classes=7)
    assert {key: getattr(config, key) for key in fields} == fields
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 5}, "5 heads do not divide embed_dim 24 of mae_custom: change one of the two"),
        ({"decoder_num_heads": 3}, "3 heads do not divide decoder_embed_dim 16 of mae_custom"),
        (
            {"decoder_embed_dim": 6, "decoder_num_heads": 1},
            "decoder_embed_dim of mae_custom is 6: 2-D sincos positions",
        ),
        ({"mask_ratio": 0.99}, "mask_ratio of mae_custom is 0.99: it must leave at least one of the 16 patches"),
        ({"mask_ratio": 0.0}, "mask_ratio of mae_custom is 0.0"),
        ({"image_size": 18}, "patches of 4 pixels do not tile images of 18"),
        ({"decoder_depth": 0}, "decoder_depth of mae_custom is 0: it must be from 1 to"),
        ({"pool": "avg"}, "unknown model option 'pool' of mae_custom"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        mae(**options)
