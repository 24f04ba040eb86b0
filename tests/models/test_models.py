"""Models: published sizes, every option, splitting into stages, and dropout that depends only on the sample."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from einops import rearrange
from torch import Tensor, nn

from helpers.oracles import timm
from helpers.plans import EVERYTHING
from vitpar import ViTConfig, model_config
from vitpar.errors import ModelError
from vitpar.models import layers
from vitpar.models.families import FAMILIES, config_from_json
from vitpar.models.initial import initialise
from vitpar.models.keyed_random import at_place, drop, keyed_uniform
from vitpar.models.layers import LayeredModel
from vitpar.models.vit.layers import Block, sincos_2d

UNKNOWN_TO_TIMM = (
    "vit_tiny_patch32_224",
    "vit_22b_patch14_224",
    *(f"vit5_{size}_patch16_224" for size in ("small", "base", "large", "xlarge")),
    "swin_huge_patch4_window7_224",
    "swin_huge48_patch4_window7_224",
)
KEYS = torch.arange(1, 9) * 1_000_003

GIGAFLOPS = {
    "vit_small_patch16_224": (197, 27.6),
    "vit_base_patch16_224": (197, 105.4),
    "vit_large_patch16_224": (197, 369.3),
    "vit_huge_patch14_224": (257, 1003.8),
    "vit_giant_patch14_224": (257, 1602.2),
    "vit_gigantic_patch14_224": (257, 2902.5),
}
"""Tokens, and GFLOPs of a training step per image: 6·(L·S·(4D²+2DM) + 2·L·S²·D + n·3P²·D + 1000·D)."""


def tiny(**options: Any) -> ViTConfig:
    sizes = {"image_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 4, "num_heads": 2, "num_classes": 3}
    return model_config("vit_custom", **{**sizes, "init": "perturbed", **options})


def filled(config: ViTConfig, layers: tuple[str, ...] | None = None) -> LayeredModel:
    model = LayeredModel(config, layers)
    initialise(model, 0, config)
    return model


OF_TIMM = [name for family in ("vit", "swin") for name in FAMILIES[family].published() if name not in UNKNOWN_TO_TIMM]


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


@pytest.mark.parametrize("name", GIGAFLOPS)
def test_flops_and_tokens_match_the_formula(name: str) -> None:
    config = model_config(name)
    assert (config.tokens, round(config.flops / 1e9, 1)) == GIGAFLOPS[name]
    assert sum(config.layer_flops.values()) == config.flops and tuple(config.layer_flops) == config.layer_names


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"pool": "avg"},
    {"num_reg_tokens": 3},
    {"num_reg_tokens": 2, "pool": "avg"},
    {"distillation": True},
    {"representation_size": 10},
    {"position": "sincos2d"},
    {"position": "sincos2d", "pool": "avg"},
    {"qk_norm": True},
    {"layer_scale": 0.1},
    {"channels": 1},
    {"mlp_hidden_dim": 20},
    EVERYTHING,
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_shapes_and_gradients_with_every_option(options: dict[str, Any]) -> None:
    config = tiny(**options)
    model = filled(config)
    images = torch.randn(8, config.channels, 8, 8)
    tokens = model.layers()["embed"](images)
    assert tokens.shape == (8, config.tokens, 24)
    assert config.tokens == 4 + config.prefix_tokens
    logits = model(images, KEYS)
    assert logits.shape == (8, 3)
    logits.logsumexp(1).sum().backward()
    # logsumexp depends on every parameter. Only a shift of all keys would be lost in the softmax.
    dead = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not dead
    outside = {name for name, p in model.named_parameters() if not p.grad.any()}
    assert outside == set()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_change_the_parameters_they_name(options: dict[str, Any]) -> None:
    with torch.device("meta"):
        plain = dict(LayeredModel(tiny()).named_parameters())
        ours = dict(LayeredModel(tiny(**options)).named_parameters())
    added = {
        "num_reg_tokens": {"embed.reg_token"},
        "distillation": {"embed.dist_token", "head.fc_dist.weight", "head.fc_dist.bias"},
        "representation_size": {"head.representation.weight", "head.representation.bias"},
        "qk_norm": {f"blocks.{i}.attn.{n}_norm.{p}" for i in range(4) for n in "qk" for p in ("weight", "bias")},
        "layer_scale": {f"blocks.{i}.ls{n}.gamma" for i in range(4) for n in (1, 2)},
    }
    expected = set(plain).union(*(added.get(name, set()) for name in options))
    expected -= {"embed.cls_token"} if options.get("pool") == "avg" else set()
    expected -= {"embed.pos_embed"} if options.get("position") == "sincos2d" else set()
    assert set(ours) == expected


@pytest.mark.parametrize("eps", [1e-6, 0.1])
def test_block_matches_torchs_transformer_layer(eps: float) -> None:
    block = Block(tiny(norm_eps=eps), 0)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    settings = {"dropout": 0.0, "activation": "gelu", "layer_norm_eps": eps, "batch_first": True, "norm_first": True}
    theirs = nn.TransformerEncoderLayer(24, 2, dim_feedforward=96, **settings)
    ours = dict(block.named_parameters())
    names = {"norm1": "norm1", "norm2": "norm2", "mlp.fc1": "linear1", "mlp.fc2": "linear2"}
    names["attn.proj"] = "self_attn.out_proj"
    state = {f"{new}.{p}": ours[f"{old}.{p}"] for old, new in names.items() for p in ("weight", "bias")}
    for p, rows in (("weight", "(h three d) w -> (three h d) w"), ("bias", "(h three d) -> (three h d)")):
        state[f"self_attn.in_proj_{p}"] = rearrange(ours[f"attn.qkv.{p}"], rows, h=2, three=3)
    theirs.load_state_dict(state)
    x = torch.randn(2, 5, 24)
    torch.testing.assert_close(block(x), theirs(x), atol=1e-5, rtol=1e-5)


def test_every_norm_has_the_models_eps() -> None:
    model = LayeredModel(tiny(qk_norm=True, norm_eps=1e-3))
    assert [norm.eps for norm in model.modules() if isinstance(norm, nn.LayerNorm)] == [1e-3] * (4 * 4 + 1)


def test_stem_is_a_convolution_by_patches() -> None:
    embed = filled(tiny(pool="avg", position="sincos2d")).embed
    assert embed is not None
    images = torch.randn(2, 3, 8, 8)
    weight = embed.patch_embed.proj.weight.view(24, 3, 4, 4)
    patches = nn.functional.conv2d(images, weight, embed.patch_embed.proj.bias, stride=4).flatten(2).transpose(1, 2)
    torch.testing.assert_close(embed(images), patches + sincos_2d(2, 2, 24), atol=1e-5, rtol=1e-5)


def test_sincos_positions_are_distinct_and_bounded() -> None:
    positions = sincos_2d(5, 7, 32)
    assert positions.shape == (35, 32) and positions.abs().max() <= 1
    assert len({tuple(row.tolist()) for row in positions}) == 35
    torch.testing.assert_close(positions[0], torch.tensor([0.0, 1.0]).repeat_interleave(8).repeat(2))


def test_average_pooling_ignores_prefix_tokens() -> None:
    config = tiny(pool="avg", num_reg_tokens=2)
    head = filled(config).head
    x = torch.randn(3, config.tokens, 24)
    changed = x.clone()
    changed[:, :2] = 100.0
    assert torch.equal(head(x), head(changed))
    changed[:, 2] = 100.0
    assert not torch.equal(head(x), head(changed))


def test_distillation_logits_are_the_mean_of_two_classifiers() -> None:
    model = filled(tiny(distillation=True))
    x = torch.randn(2, 6, 24)
    normed = model.head.norm(x)
    expected = (model.head.fc(normed[:, 0]) + model.head.fc_dist(normed[:, 1])) / 2
    torch.testing.assert_close(model.head(x), expected)


@pytest.mark.parametrize("cut", range(1, 6))
def test_two_stages_compute_the_same_as_the_complete_model(cut: int) -> None:
    """A pipeline cuts the model between any two layers, also after embed and before the head."""
    config = tiny(**EVERYTHING)
    whole = filled(config).train()
    names = config.layer_names
    first, second = filled(config, names[:cut]).train(), filled(config, names[cut:]).train()
    assert (*first.layers(), *second.layers()) == names
    held = {**dict(first.named_parameters()), **dict(second.named_parameters())}
    assert held.keys() == dict(whole.named_parameters()).keys()
    assert len(held) == len(list(first.parameters())) + len(list(second.parameters()))
    images = torch.randn(8, 3, 8, 8)
    assert torch.equal(second(first(images, KEYS), KEYS), whole(images, KEYS))


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


def test_blocks_compile_to_one_training_and_one_evaluation_graph() -> None:
    """A Python number that differs between blocks would cause a graph per block.

    Beyond the recompile limit, blocks run eagerly.
    """
    graphs = 0

    def count(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return module.forward

    torch.compiler.reset()
    model = LayeredModel(tiny(depth=12, drop_path=0.2, dropout=0.1))
    initialise(model, 0, model.config)
    for block in model.blocks.values():
        block.compile(backend=count, fullgraph=True)
    images = torch.randn(2, 3, 8, 8)
    model.train()(images, torch.tensor([1, 2]))
    assert graphs == 1
    model.eval()(images)
    assert graphs == 2


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


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("patches of 3 pixels do not tile images of 8 .* use an image size of 9", {"patch_size": 3}),
        ("5 heads do not divide embed_dim 24", {"num_heads": 5}),
        (
            "embed_dim of vit_custom is 30: 2-D sincos positions need a multiple of 4",
            {"position": "sincos2d", "embed_dim": 30},
        ),
        ("distillation token .* needs pool 'cls', not 'avg'", {"distillation": True, "pool": "avg"}),
        ("rope_grid .* needs rope 'axial', not 'dinov3'", {"rope": "dinov3", "rope_grid": 16}),
        ("rope_temperature .* needs rope", {"rope_temperature": 100.0}),
        ("prefix_positions .* needs position 'learned'", {"prefix_positions": False, "position": "sincos2d"}),
        ("unknown pool 'cl' of vit_custom .did you mean 'cls'.*use cls or avg", {"pool": "cl"}),
        ("num_reg_tokens .* is -1", {"num_reg_tokens": -1}),
        ("drop_path .* is 1.0", {"drop_path": 1.0}),
        ("dropout .* is -0.1", {"dropout": -0.1}),
        ("depth .* is 0", {"depth": 0}),
        ("num_classes .* is 0", {"num_classes": 0}),
    ],
)
def test_incompatible_options_are_refused(message: str, options: dict[str, Any]) -> None:
    refused(message, **options)


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


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({name: HUGE}, f"{name} of vit_custom is 10+…: it must be from 1 to")
            for name in ("depth", "embed_dim", "num_heads")
        ),
        ({"depth": 1_025}, "depth of vit_custom is 1025: it must be from 1 to 1,024"),
        ({"mlp_hidden_dim": 131_073}, "mlp_hidden_dim of vit_custom is 131073: it must be from 1 to 131,072"),
        ({"num_classes": 10**9}, "num_classes of vit_custom is 1000000000: it must be from 1 to 1,000,000"),
        ({"image_size": HUGE}, "image_size of vit_custom is 10+…: it must be from 1 to 16,384"),
        ({"patch_size": 10**9}, "patch_size of vit_custom is 1000000000: it must be from 1 to 16,384"),
        ({"channels": 10**9}, "channels of vit_custom is 1000000000: it must be from 1 to 1,024"),
        (
            {"representation_size": 10**9},
            "representation_size of vit_custom is 1000000000: it must be from 1 to 131,072",
        ),
        ({"num_reg_tokens": HUGE}, "images of vit_custom have 10+… tokens, above 1,048,576: use larger patches"),
        ({"image_size": 16_384, "patch_size": 8}, "images of vit_custom have 4194305 tokens, above 1,048,576"),
        ({"norm_eps": 0.0}, "norm_eps of vit_custom is 0.0: it must be above 0 and at most 1"),
        ({"norm_eps": float("nan")}, "norm_eps of vit_custom is nan"),
        ({"drop_path": float("nan")}, "drop_path of vit_custom is nan"),
        ({"pool": "x" * 10**6}, "unknown pool 'x{198}…' of vit_custom"),
        ({"x" * 10**6: 1}, "unknown model option 'x{198}…'"),
    ],
)
def test_absurd_model_sizes_are_refused(options: dict[str, Any], message: str) -> None:
    refused(message, **options)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vit_tiny_patch4_99999999999", "unknown model 'vit_tiny_patch4_99999999999'"),
        ("vit_tiny_patch4_" + "9" * 5_000, "unknown model 'vit_tiny_patch4_9+…'"),
        ("vit_tiny_patch4_²", "unknown model 'vit_tiny_patch4_²'"),
        ("vit_tiny_patch٤_32", "unknown model 'vit_tiny_patch٤_32'"),
        ("vit_tiny_patch0_32", "patch_size of vit_tiny_patch0_32 is 0"),
        (
            "vit_tiny_patch4_999999999",
            "image_size of vit_tiny_patch4_999999999 is 999999999: it must be from 1 to 16,384",
        ),
        ("v" * 10**6, "unknown model 'v{198}…'"),
    ],
)
def test_absurd_model_names_are_refused(name: str, message: str) -> None:
    refused(message, name)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"depth": "4"}, "depth: Input should be a valid integer"),
        ({"depth": 4.5}, "depth: Input should be a valid integer"),
        ({"depth": HUGE}, "depth of x is 10+…: it must be from 1 to 1,024"),
        ({"x" * 10**6: 1}, "unknown model field 'x{198}…'"),
        ({"name": 3}, "name: Input should be a valid string"),
    ],
)
def test_config_from_json_checks_types(said: dict[str, Any], message: str) -> None:
    whole = {
        "name": "x",
        "patch_size": 4,
        "embed_dim": 24,
        "depth": 4,
        "num_heads": 2,
        "mlp_hidden_dim": 96,
        "image_size": 8,
    }
    assert config_from_json(whole) == ViTConfig(**whole)
    with pytest.raises(ModelError, match=message):
        config_from_json(whole | said)
