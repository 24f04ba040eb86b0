"""Initial values: distributions of timm's schemes, and the same values on every machine."""

import hashlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.converted import converted
from helpers.distributions import distance
from helpers.foreign_models import new_timm_swin
from helpers.oracles import timm
from helpers.plans import EVERYTHING
from vitpar import ViTConfig, model_config
from vitpar.models import initial
from vitpar.models.initial import initial_value, initial_values, initialise, seeding_name
from vitpar.models.layers import LayeredModel
from vitpar.models.swin.config import SwinConfig

SIZES = {"image_size": 8, "patch_size": 4, "embed_dim": 192, "depth": 1, "num_heads": 3, "num_classes": 20}
SEEDS = 12
SAMPLES = 40_000  # per parameter, at most
TIMM = {"jax": "jax", "timm": "", "moco": "moco"}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"pool": "avg", "layer_scale": 0.1},
    {"num_reg_tokens": 2, "qk_norm": True},
    {"distillation": True, "layer_scale": 1e-5},
)


def timms(config: ViTConfig | SwinConfig) -> nn.Module:
    """Return timm's model of this configuration, with timm's initialisation."""
    if isinstance(config, SwinConfig):
        return new_timm_swin(config)
    options = {
        "img_size": config.image_size,
        "patch_size": config.patch_size,
        "num_classes": config.num_classes,
        "embed_dim": config.embed_dim,
        "depth": config.depth,
        "num_heads": config.num_heads,
        "qk_norm": config.qk_norm,
        "init_values": config.layer_scale,
        "weight_init": TIMM[config.init],
    }
    if config.distillation:
        return timm.models.deit.VisionTransformerDistilled(**options)
    return timm.models.vision_transformer.VisionTransformer(
        **options,
        class_token=config.pool == "cls",
        reg_tokens=config.num_reg_tokens,
        global_pool="token" if config.pool == "cls" else "avg",
        fc_norm=False,
    )


def drawn_by_timm(config: ViTConfig | SwinConfig) -> dict[str, Tensor]:
    """Return timm's values of each parameter over several seeds, by vitpar's names."""
    found: dict[str, list[Tensor]] = {}
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        state = {name: p.detach() for name, p in timms(config).named_parameters()}
        for name, value in converted(state, config).items():
            found.setdefault(name, []).append(value.flatten())
    return {name: torch.cat(values)[:SAMPLES].double() for name, values in found.items()}


def drawn_by_us(config: ViTConfig | SwinConfig) -> dict[str, Tensor]:
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in LayeredModel(config).named_parameters()}
    found = {}
    for name, shape in shapes.items():
        seeds = range(min(SEEDS, -(-SAMPLES // shape.numel())))
        values = [initial_value(name, shape, seed, config).flatten() for seed in seeds]
        found[name] = torch.cat(values)[:SAMPLES].double()
    return found


def difference(ours: Tensor, theirs: Tensor) -> str | None:
    """Return how two samples of equal size differ beyond chance, or None. Constants are compared exactly."""
    if ours.unique().numel() == 1 or theirs.unique().numel() == 1:
        return None if torch.equal(ours, theirs) else f"constants {ours[0]} and {theirs[0]}"
    n, std = theirs.numel(), theirs.std().item()
    if abs(ours.mean() - theirs.mean()) > 6 * std * (2 / n) ** 0.5:
        return f"means {ours.mean()} and {theirs.mean()}"
    if abs(ours.std() / std - 1) > 6 / n**0.5:  # 6 sigma for normal samples; shorter tails vary less
        return f"deviations {ours.std()} and {std}"
    bounds = [x.abs().max().item() for x in (ours, theirs)]
    # Compare the extremes of bounded distributions (uniform, truncated normal); those of a normal differ by chance.
    if max(bounds) < 2.5 * std and abs(bounds[0] / bounds[1] - 1) > 20 / n:
        return f"largest {bounds[0]} and {bounds[1]}"
    found = distance(ours, theirs)
    return f"distance {found}" if found > 2.7 * (2 / n) ** 0.5 else None  # by chance once in a million times


def differences(config: ViTConfig | SwinConfig) -> dict[str, str]:
    ours, theirs = drawn_by_us(config), drawn_by_timm(config)
    assert ours.keys() == theirs.keys()
    return {name: found for name in ours if (found := difference(ours[name], theirs[name]))}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("scheme", TIMM)
def test_distributions_match_timm(scheme: str, options: dict[str, Any]) -> None:
    assert differences(model_config("vit_custom", **{**SIZES, **options, "init": scheme})) == {}


def test_distributions_of_swin_match_timm() -> None:
    config = model_config("swin_nano_patch2_window7_28", num_classes=20, depths=(2, 2), num_heads=(2, 4))
    assert differences(config) == {}


@pytest.mark.parametrize("scheme", TIMM)
def test_representation_layer_distribution_matches_timm(scheme: str) -> None:
    """The layer starts like any linear layer, except under "jax", where it starts like timm's `pre_logits` (0.4.12)."""
    config = model_config("vit_custom", **SIZES, representation_size=96, init=scheme)
    shape, name = torch.Size((96, 192)), "head.representation.weight"
    layers, theirs = timm.models.vision_transformer, []
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        linear = nn.Linear(192, 96)
        if scheme == "jax":
            timm.layers.lecun_normal_(linear.weight)
        else:
            layers.get_init_weights_vit(TIMM[scheme], needs_reset=False)(linear, "pre_logits")
        theirs.append(linear.weight.detach().flatten().double())
    ours = [initial_value(name, shape, seed, config).flatten().double() for seed in range(SEEDS)]
    assert difference(torch.cat(ours), torch.cat(theirs)) is None
    assert not initial_value("head.representation.bias", shape[:1], 0, config).any()


def perturbed(**options: Any) -> LayeredModel:
    config = model_config("vit_custom", **{**SIZES, **EVERYTHING, "init": "perturbed", **options})
    model = LayeredModel(config).double()
    initialise(model, 0, config)
    return model


def gradients(model: LayeredModel) -> dict[str, float]:
    """Return the largest absolute gradient of each parameter, for a loss over 8 images."""
    g = torch.Generator().manual_seed(0)
    logits = model(torch.randn(8, 3, 8, 8, dtype=torch.float64, generator=g))
    F.cross_entropy(logits, torch.randint(0, 20, (8,), generator=g)).backward()
    return {name: p.grad.abs().max().item() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("options", [{}, {"pool": "avg", "distillation": False, "num_reg_tokens": 0}], ids=str)
def test_perturbed_values_give_every_parameter_a_gradient(options: dict[str, Any]) -> None:
    model = perturbed(representation_size=24, **options)
    found = gradients(model)
    assert found.keys() == dict(model.named_parameters()).keys()
    # Softmax does not change when all keys shift equally, so the bias of k_norm has no gradient.
    assert min(size for name, size in found.items() if not name.endswith("k_norm.bias")) > 1e-5
    for name, parameter in model.named_parameters():
        assert parameter.unique().numel() > 0.9 * parameter.numel(), name


def test_jax_starts_with_a_classifier_of_zeros() -> None:
    found = gradients(perturbed(init="jax"))
    assert {name for name, size in found.items() if size > 0} == {
        f"head.{layer}.{end}" for layer in ("fc", "fc_dist") for end in ("weight", "bias")
    }


def fingerprints() -> dict[str, str]:
    """Return a digest of one tensor per kind of distribution: constant, uniform, normal and truncated normal."""
    config = model_config("vit_custom", **SIZES)
    values = {name: initial_value(name, torch.Size((100, 101)), 7, config) for name in KNOWN}
    return {name: hashlib.blake2b(v.numpy().tobytes(), digest_size=8).hexdigest() for name, v in values.items()}


KNOWN = {
    "blocks.0.norm1.weight": "c7d8e9da32240b3c",
    "blocks.0.mlp.fc2.weight": "85c2a97458a9d893",
    "embed.pos_embed": "53729fb1b7067d1e",
    "embed.patch_embed.proj.weight": "26f70abfc4590a40",
}


def test_initial_values_are_the_same_on_every_machine() -> None:
    """The known digests come from torch 2.13 on x86-64."""
    assert fingerprints() == KNOWN


def test_random_numbers_are_drawn_under_names_that_never_change() -> None:
    with torch.device("meta"):
        model = LayeredModel(model_config("vit_tiny_patch16_32", depth=2, **EVERYTHING))
    seeding = {name: seeding_name(name) for name, _ in model.named_parameters()}
    assert len({*seeding.values()}) == len(seeding), "no two parameters draw the same numbers"
    assert seeding["embed.patch_embed.proj.weight"] == "stem.proj.weight"
    assert seeding["embed.pos_embed"] == "stem.pos_embed"
    assert seeding["blocks.1.ls2.gamma"] == "blocks.1.gamma2"
    assert seeding["blocks.1.mlp.fc1.bias"] == "blocks.1.mlp.fc1.bias"


def test_large_tensors_do_not_depend_on_the_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprints()
    monkeypatch.setattr(initial, "CHUNK", 1000)
    assert fingerprints() == before


def test_threads_draw_the_same_values_and_leave_the_number_of_threads() -> None:
    config, threads = config_of(), torch.get_num_threads()
    before = one_process(0, config)
    shapes = {name: value.shape for name, value in before.items()}
    torch.set_num_threads(3)
    try:
        after = dict(initial_values(shapes, 0, config, threads=3))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    assert list(after) == list(before) and all(torch.equal(value, after[name]) for name, value in before.items())


def config_of(**options: Any) -> ViTConfig:
    sizes = {"image_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 3, "num_heads": 2, "num_classes": 3}
    return model_config("vit_custom", **{**sizes, **EVERYTHING, **options})


def one_process(seed: int, config: ViTConfig) -> dict[str, Tensor]:
    model = LayeredModel(config)
    initialise(model, seed, config)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("options", [{}, {"position": "sincos2d"}, {"pool": "avg", "distillation": False}], ids=str)
def test_initialise_fills_every_parameter_and_buffer(options: dict[str, Any]) -> None:
    config = config_of(representation_size=12, **options)
    model = LayeredModel(config)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
    initialise(model, 0, config)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor.isfinite().all() and not (tensor == -1).all(), name


def test_values_depend_on_seed_and_name() -> None:
    one, same, other = (one_process(seed, config_of()) for seed in (1, 1, 2))
    drawn = {name for name, value in one.items() if value.unique().numel() > 1}
    assert {name.rpartition(".")[2] for name in one.keys() - drawn} == {"weight", "bias", "gamma"}
    assert "embed.cls_token" in drawn and "blocks.2.mlp.fc2.weight" in drawn and "head.fc_dist.weight" not in drawn
    for name, value in one.items():
        assert torch.equal(value, same[name])
        assert torch.equal(value, other[name]) == (name not in drawn), name
    assert not torch.equal(one["blocks.0.attn.qkv.weight"], one["blocks.1.attn.qkv.weight"])


def test_initial_values_neither_use_nor_advance_the_global_rng() -> None:
    """A program that draws its own random numbers gets the same model and the same numbers."""
    shape, config = torch.Size((24, 96)), config_of()
    torch.manual_seed(0)
    first = initial_value("blocks.0.mlp.fc2.weight", shape, 3, config)
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(initial_value("blocks.0.mlp.fc2.weight", shape, 3, config), first)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(1), after)  # the global generator did not advance
