"""Models: published sizes, every option, layers that models share, and dropout that depends only on the sample."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch._logging._internal import warning_once

from helpers.converted import filled
from helpers.oracles import timm
from helpers.plans import EVERYTHING
from vitpar import ViTConfig, model_config
from vitpar.errors import ModelError
from vitpar.models import layers
from vitpar.models.families import FAMILIES, config_from_json, config_to_json
from vitpar.models.initial import initialise
from vitpar.models.keyed_random import at_place, drop, keyed_uniform
from vitpar.models.layers import LayeredModel, LayerNorm
from vitpar.models.vit.layers import sincos_2d

UNKNOWN_TO_TIMM = (
    "vit_tiny_patch32_224",
    "vit_22b_patch14_224",
    *(f"vit5_{size}_patch16_224" for size in ("small", "base", "large", "xlarge")),
    "swin_huge_patch4_window7_224",
    "swin_huge48_patch4_window7_224",
)
KEYS = torch.arange(1, 9) * 1_000_003


def tiny(**options: Any) -> ViTConfig:
    sizes = {"image_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 4, "num_heads": 2, "num_classes": 3}
    return model_config("vit_custom", **{**sizes, "init": "perturbed", **options})


OF_TIMM = [name for family in ("vit", "swin") for name in FAMILIES[family].PUBLISHED if name not in UNKNOWN_TO_TIMM]


@pytest.mark.parametrize("name", OF_TIMM)
def test_number_of_parameters_matches_timm(name: str) -> None:
    with torch.device("meta"):
        ours = LayeredModel(model_config(name))
        theirs = timm.create_model(name, num_classes=1000)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())


def test_number_of_parameters_of_vit_22b_matches_the_paper() -> None:
    with torch.device("meta"):
        model = LayeredModel(model_config("vit_22b_patch14_224"))
    assert sum(p.numel() for p in model.blocks.parameters() if p.dim() == 2) == 21_743_271_936  # "21743M" in table 1


def test_sincos_positions_are_distinct_and_bounded() -> None:
    positions = sincos_2d(5, 7, 32)
    assert positions.shape == (35, 32) and positions.abs().max() <= 1
    assert len({tuple(row.tolist()) for row in positions}) == 35
    torch.testing.assert_close(positions[0], torch.tensor([0.0, 1.0]).repeat_interleave(8).repeat(2))


@pytest.mark.parametrize("option", ["drop_path", "dropout"])
def test_dropout_depends_only_on_the_sample_key(option: str) -> None:
    """A sample drops the same elements alone, in a batch and at any position, so plans that split a batch agree."""
    model = filled(tiny(**{option: 0.5})).train()
    images = torch.randn(1, 3, 8, 8).expand(8, -1, -1, -1)
    together = model(images, KEYS)
    alone = torch.cat([model(images[i : i + 1], KEYS[i : i + 1]) for i in range(8)])
    torch.testing.assert_close(together, alone)
    order = torch.tensor([3, 1, 7, 0])
    torch.testing.assert_close(model(images[order], KEYS[order]), together[order])
    assert len({tuple(row.tolist()) for row in together.detach()}) > 4  # equal images with different keys


@pytest.mark.parametrize("option", ["drop_path", "dropout"])
def test_nothing_is_dropped_in_evaluation_or_without_keys(option: str) -> None:
    dropping, plain = filled(tiny(**{option: 0.5})), filled(tiny())
    images = torch.randn(8, 3, 8, 8)
    expected = plain.eval()(images)
    assert torch.equal(dropping.eval()(images, KEYS), expected)
    assert torch.equal(dropping.train()(images), expected)
    assert not torch.equal(dropping(images, KEYS), expected)


def test_drop_path_rises_linearly_to_the_last_block() -> None:
    model = LayeredModel(tiny(drop_path=0.3))
    assert [block.drop_path_rate for block in model.blocks.values()] == pytest.approx([0, 0.1, 0.2, 0.3])
    assert LayeredModel(tiny(drop_path=0.3, depth=1)).blocks["0"].drop_path_rate == 0


def test_every_dropout_has_its_own_random_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Embed has place 0. Each block has four: dropout and drop-path of attention and of the MLP."""
    model, used = LayeredModel(tiny(drop_path=0.1, dropout=0.1)).train(), [0]
    initialise(model, 0, model.config)
    monkeypatch.setattr(layers, "at_place", lambda keys, place: (used.append(int(place)), at_place(keys, place))[1])
    for block in model.blocks.values():
        block(torch.randn(8, 4, model.config.embed_dim), KEYS)
    assert used == list(range(17))


def test_dropout_rate_scale_and_independence() -> None:
    keys = torch.arange(4000) * 7919
    x = torch.ones(4000, 2, 5)
    place = torch.tensor(3)
    elements = drop(x, at_place(keys, place), 0.3, whole_sample=False)
    assert elements.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    assert (elements == 0).float().mean().item() == pytest.approx(0.3, abs=0.01)
    samples = drop(x, at_place(keys, place), 0.3, whole_sample=True)
    assert torch.equal(samples, samples[:, :1, :1].expand_as(samples))
    assert (samples[:, 0, 0] == 0).float().mean().item() == pytest.approx(0.3, abs=0.03)
    uniform = torch.stack([keyed_uniform(at_place(keys, torch.tensor(i)), []) for i in range(5)])
    assert uniform.min() >= 0 and uniform.max() < 1
    assert (torch.corrcoef(uniform) - torch.eye(5)).abs().max() < 0.06  # different places are uncorrelated
    neighbours = keyed_uniform(torch.arange(4001), [])
    assert abs(torch.corrcoef(torch.stack([neighbours[1:], neighbours[:-1]]))[0, 1]) < 0.06


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "first"), [((), 0), ((3, 40), 0), ((3, 40), 13)])
def test_compiled_random_numbers_are_those_of_eager(shape: tuple[int, ...], first: int) -> None:
    """The compiler sees the arithmetic; here it compiles the same for the CPU."""
    keys = torch.cat([torch.arange(-3, 4), torch.tensor([2**62, -(2**63), 2**63 - 1]), torch.arange(4000) * 7919])
    compiled = torch.compile(keyed_uniform, fullgraph=True, dynamic=False)(keys, shape, first)
    assert torch.equal(compiled, keyed_uniform(keys, shape, first))


def refused(message: str, name: str = "vit_custom", **options: Any) -> None:
    sizes = (
        {"image_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 4, "num_heads": 2} if name == "vit_custom" else {}
    )
    with pytest.raises(ModelError, match=message):
        model_config(name, **{**sizes, **options})


def test_unknown_names_and_options_suggest_the_nearest() -> None:
    refused("unknown model 'vit_smal_patch16_224' .did you mean 'vit_small_patch16_224'", "vit_smal_patch16_224")
    refused("unknown model 'vit_smal' .did you mean 'vit_small_patch16_224'", "vit_smal")
    refused("unknown model 'swin_tny' .did you mean 'swin_tiny_patch4_window7_224'", "swin_tny")
    refused("unknown model 'resnet50'", "resnet50")
    refused("unknown model 'vit_small'", "vit_small")
    refused("unknown model 'vit_small_patch16_'", "vit_small_patch16_")
    refused("unknown model option 'drop_paht' of vit_custom .did you mean 'drop_path'", drop_paht=0.1)
    with pytest.raises(ModelError, match="vit_custom needs the model options depth, num_heads, patch_size"):
        model_config("vit_custom", embed_dim=24)


def test_model_names_accept_any_patch_and_image_size() -> None:
    config = model_config("vit_tiny_patch4_32", num_classes=10)
    assert (config.patch_size, config.image_size, config.embed_dim, config.patches) == (4, 32, 192, 64)
    assert model_config("vit_tiny_patch4_32", embed_dim=96).mlp_hidden_dim == 384
    assert dataclasses.replace(config, image_size=16).tokens == 17


def test_prefix_tokens_are_class_distillation_registers(images: Tensor = torch.zeros(1, 3, 8, 8)) -> None:
    embed = filled(tiny(**EVERYTHING)).embed
    with torch.no_grad():
        for value, token in enumerate((embed.cls_token, embed.dist_token, embed.reg_token), start=1):
            token.fill_(value)
        embed.pos_embed.zero_()
        embed.patch_embed.proj.bias.fill_(9)
    assert embed(images)[0, :, 0].tolist() == [1, 2, 3, 3, 9, 9, 9, 9]


HUGE = 10**400
LARGE = "x" * 10**6
TOO_MANY = {"num_reg_tokens": HUGE}


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("patches of 3 pixels do not tile images of 8 .* use an image size of 9", {"patch_size": 3}),
        ("5 heads do not divide embed_dim 24", {"num_heads": 5}),
        ("embed_dim of .* is 30: 2-D sincos positions", {"position": "sincos2d", "embed_dim": 30}),
        ("distillation token .* needs pool 'cls', not 'avg'", {"distillation": True, "pool": "avg"}),
        ("rope_grid .* needs rope 'axial', not 'dinov3'", {"rope": "dinov3", "rope_grid": 16}),
        ("rope_temperature .* needs rope", {"rope_temperature": 100.0}),
        ("prefix_positions .* needs position 'learned'", {"prefix_positions": False, "position": "sincos2d"}),
        ("unknown pool 'cl' of vit_custom .did you mean 'cls'.*use cls or avg", {"pool": "cl"}),
        ("num_reg_tokens .* is -1", {"num_reg_tokens": -1}),
        ("drop_path .* is 1.0", {"drop_path": 1.0}),
        ("drop_path .* is nan", {"drop_path": float("nan")}),
        ("dropout .* is -0.1", {"dropout": -0.1}),
        ("num_classes .* is 0", {"num_classes": 0}),
        ("depth of vit_custom is 1025: it must be from 1 to 1,024", {"depth": 1_025}),
        ("embed_dim .* is 10+…: it must be", {"embed_dim": HUGE}),
        ("images of vit_custom have 10+… tokens, above 1,048,576: use larger patches", TOO_MANY),
        ("have 4194305 tokens, above", {"image_size": 16_384, "patch_size": 8}),
        ("norm_eps .* is 0.0: it must be above 0", {"norm_eps": 0.0}),
        ("unknown pool 'x{198}…'", {"pool": LARGE}),
        ("unknown model option 'x{198}…'", {LARGE: 1}),
    ],
)
def test_options_that_do_not_fit_are_refused(message: str, options: dict[str, Any]) -> None:
    refused(message, **options)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vit_tiny_patch4_" + "9" * 5_000, "unknown model 'vit_tiny_patch4_9+…'"),
        ("vit_tiny_patch4_²", "unknown model 'vit_tiny_patch4_²'"),
        ("vit_tiny_patch0_32", "patch_size of vit_tiny_patch0_32 is 0"),
        ("vit_tiny_patch4_999999999", "image_size .* is 999999999: it must be from 1 to 16,384"),
    ],
)
def test_absurd_model_names_are_refused(name: str, message: str) -> None:
    refused(message, name)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"depth": "4"}, "depth: Input should be a valid integer"),
        ({LARGE: 1}, "unknown model field 'x{198}…'"),
        ({"name": 3}, "name: Input should be a valid string"),
    ],
)
def test_config_from_json_checks_types(said: dict[str, Any], message: str) -> None:
    whole = config_to_json(tiny())
    assert config_from_json(whole) == tiny()
    with pytest.raises(ModelError, match=message):
        config_from_json(whole | said)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_a_norm_are_accurate_for_many_tokens(dtype: torch.dtype) -> None:
    """torch's own are off by a fifth: tokens are added to a sum of the same few bits."""
    torch.manual_seed(0)
    x, gradient = torch.randn(16, 512, 8), torch.randn(16, 512, 8) / 10 + 0.02
    x, gradient = x.to(dtype), gradient.to(dtype)
    ours, theirs = LayerNorm(8), nn.LayerNorm(8).double()
    ours.to(dtype)(x).backward(gradient)
    theirs(x.double()).backward(gradient.double())
    for mine, exact in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (mine.grad - exact.grad).norm() <= 0.01 * exact.grad.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norm_equals_torchs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours, theirs, x = LayerNorm(8, eps=0.1).to(dtype), nn.LayerNorm(8, eps=0.1).to(dtype), torch.randn(4, 8).to(dtype)
    with torch.no_grad():
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            other.copy_(mine.copy_(torch.randn(8)))
    limit = 0.02 if dtype is torch.bfloat16 else 0.0
    torch.testing.assert_close(ours(x), theirs(x), rtol=limit, atol=limit)


def block(dtype: torch.dtype, **options: Any) -> Any:
    """Return the second block of a small model, with biases that matter."""
    config = model_config("vit_nano_patch4_16", num_classes=10, depth=2, **options)
    torch.manual_seed(0)
    layer: Any = config.build_layer("blocks.1")
    layer.reset_buffers()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, mean=0.5 if parameter.dim() == 1 else 0, std=0.1)
    return layer.to(dtype)


def results(forward: Any, layer: nn.Module, x: Tensor, gradient: Tensor) -> list[Tensor]:
    """Return the output and the gradients of input and parameters; zeros for those of frozen parameters."""
    layer.zero_grad()
    x = x.detach().requires_grad_(x.requires_grad)
    y = forward(x, torch.arange(len(x)))
    y.backward(gradient)
    found = [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]
    return [torch.zeros(1) if one is None else one for one in found]


@pytest.mark.parametrize(
    ("options", "frozen", "dtype", "rearranged"),
    [
        ({}, "", torch.float64, True),
        ({}, "", torch.bfloat16, True),
        ({"drop_path": 0.5}, "", torch.float64, True),
        ({"drop_path": 0.5}, "", torch.bfloat16, True),
        ({}, "x attn.qkv.bias attn.proj.bias mlp.fc2.bias", torch.float64, True),
        ({}, "x attn.qkv.weight attn.proj.weight mlp.fc2.weight norm1.weight norm1.bias", torch.float64, True),
        ({"layer_scale": 0.1}, "", torch.float64, False),
        ({"drop_path": 0.5, "dropout": 0.1}, "", torch.float64, False),
        ({"qkv_bias": "none"}, "", torch.float64, True),
    ],
)
def test_compiled_block_equals_an_uncompiled_one(
    options: dict[str, Any], frozen: str, dtype: torch.dtype, rearranged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Compiled, a block sums for biases elsewhere and adds its last product in place (vitpar.models.compiled)."""
    torch.compiler.reset()
    warning_once.cache_clear()
    exact, layer, graphs = block(torch.float64, **options), block(dtype, **options), AotEagerAndRecordGraphs()
    exact.load_state_dict(layer.state_dict())
    for name in set(frozen.split()) - {"x"}:
        exact.get_parameter(name).requires_grad_(False)
        layer.get_parameter(name).requires_grad_(False)
    x, gradient = torch.randn(2, 8, 5, exact.width).to(dtype)
    x.requires_grad_("x" not in frozen)
    compiled = torch.compile(layer.forward, backend=graphs, fullgraph=True)
    found, plain = (results(forward, layer, x, gradient) for forward in (compiled, layer))
    assert ("add_product_" in graphs.fw_graphs[0].code) is rearranged
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    for mine, rounded, right in zip(found, plain, results(exact, exact, x.double(), gradient.double()), strict=True):
        error, usual = ((one - right).norm() / right.norm() if right.any() else one.norm() for one in (mine, rounded))
        assert error <= 1e-12 + 2 * usual and usual < 0.05
