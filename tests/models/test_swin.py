"""Swin Transformer: logits and gradients of timm and transformers, description, names, refusals, initial values."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.converted import converted, error, filled, found_in, gradient_errors
from helpers.foreign_models import randomised, timm_swin
from helpers.oracles import timm, transformers
from vitpar.errors import DataError, ModelError
from vitpar.models.families import model_config
from vitpar.models.keyed_random import at_place, drop
from vitpar.models.layers import LayeredModel
from vitpar.models.swin.config import SwinConfig
from vitpar.weights.foreign import FAMILIES, recognised

KEYS = torch.arange(1, 9) * 1_000_003
WEIGHTS = FAMILIES["swin"]


def swin(**options: Any) -> SwinConfig:
    sizes = {"patch_size": 2, "image_size": 16, "window_size": 4, "num_classes": 3, "init": "perturbed"}
    sizes |= {"embed_dim": 8, "depths": (2, 2), "num_heads": (2, 4)}
    config = model_config("swin_custom", **{**sizes, **options})
    assert isinstance(config, SwinConfig)
    return config


CASES: dict[str, SwinConfig] = {
    "shifted in both stages": swin(image_size=32),
    "one window in the last stage": swin(image_size=28, window_size=7),
    "window of one token": swin(window_size=1, image_size=8),
    "odd window, odd depths": swin(image_size=24, window_size=3, depths=(1, 3, 1), num_heads=(1, 2, 8)),
    "one stage": swin(depths=(3,), num_heads=(2,), channels=3),
    "four stages": swin(
        embed_dim=12, depths=(2, 2, 6, 2), num_heads=(3, 6, 12, 24), window_size=2, image_size=32, mlp_ratio=2.3
    ),
}
SMALLER_WINDOWS: dict[str, SwinConfig] = {
    "one window in every stage": swin(image_size=8, window_size=4),
    "smaller window in the last stage": swin(image_size=12, window_size=6),
    "smaller windows in two stages": swin(image_size=32, depths=(1, 2, 2), num_heads=(2, 2, 2), window_size=8),
    "every stage smaller than the window": swin(image_size=8, window_size=100),
}
"""transformers cannot compute these: its bias has the shape of the larger window."""


def transformers_(config: SwinConfig) -> nn.Module:
    """Return transformers' model of this configuration, with random values of every parameter, in evaluation mode."""
    torch.manual_seed(0)
    settings = transformers.SwinConfig(
        image_size=config.image_size,
        patch_size=config.patch_size,
        num_channels=config.channels,
        num_labels=config.num_classes,
        embed_dim=config.embed_dim,
        depths=config.depths,
        num_heads=config.num_heads,
        window_size=config.window_size,
        mlp_ratio=config.mlp_ratio,
        drop_path_rate=config.drop_path,
    )
    return randomised(transformers.SwinForImageClassification(settings))


def shapes_of(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def inferred(state: Mapping[str, Tensor], model: str | None = None, **said: Any) -> SwinConfig:
    """Return the configuration of tensors. said: fields that config.json gives."""
    config = WEIGHTS.infer_config("x", found_in(state, CASES["one stage"]), said, model)
    assert isinstance(config, SwinConfig)
    return config


def assert_same_function(theirs: nn.Module, config: SwinConfig) -> None:
    """Check that logits and the gradient of every parameter are equal, relative to the largest element."""
    theirs = theirs.double()
    ours = filled(config, converted(dict(theirs.named_parameters()), config), torch.float64)
    images = torch.randn(3, config.channels, config.image_size, config.image_size, dtype=torch.float64)
    output = theirs(images)
    expected, logits = getattr(output, "logits", output), ours(images)
    for computed in (logits, expected):
        F.cross_entropy(computed, torch.arange(3) % config.num_classes).backward()
    errors = {"logits": error(logits, expected), **gradient_errors(ours, theirs)}
    assert max(errors.values()) <= 1e-10, errors
    for name, parameter in ours.named_parameters():
        assert parameter.grad.any() or (config.window_size == 1 and name.endswith("table")), name  # type: ignore[union-attr]


@pytest.mark.parametrize("case", [*CASES, *SMALLER_WINDOWS])
def test_logits_and_gradients_match_timm_in_float64(case: str) -> None:
    config = {**CASES, **SMALLER_WINDOWS}[case]
    assert_same_function(timm_swin(config), config)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_match_transformers_in_float64(case: str) -> None:
    assert_same_function(transformers_(CASES[case]), CASES[case])


def test_kinds_groups_and_boundaries() -> None:
    config = swin(depths=(2, 1, 3), num_heads=(2, 4, 4), image_size=32)
    kinds = [layer.kind for layer in config.layers.values()]
    assert kinds == ["embed", "stage1", "stage1", "merge2", "merge3", "stage3", "stage3", "head"]
    assert config.groups == {"stage1": range(2), "stage2": range(2, 3), "stage3": range(3, 6)}
    layers = list(config.layers.values())
    assert all(before.gives == after.takes for before, after in pairwise(layers))
    for layer in layers:
        same = config.kinds[layer.kind]
        assert (layer.numel, layer.flops, layer.takes, layer.gives) == (same.numel, same.flops, same.takes, same.gives)


@pytest.mark.parametrize(("name", "third"), [("swin_huge", 26), ("swin_huge48", 42)])
def test_huge_models_have_galvatrons_sizes(name: str, third: int) -> None:
    config = model_config(f"{name}_patch4_window7_224")
    assert isinstance(config, SwinConfig)
    assert (config.depths, config.num_heads) == ((2, 2, third, 2), (8, 16, 32, 64))
    shapes = [(stage.width, stage.grid**2, stage.mlp_hidden_dim) for stage in config.stages]
    assert shapes == [(320, 3136, 1280), (640, 784, 2560), (1280, 196, 5120), (2560, 49, 10240)]


def test_names_accept_any_patch_window_and_image_size() -> None:
    config = model_config("swin_tiny_patch2_window4_32", num_classes=10, drop_path=0.1)
    assert isinstance(config, SwinConfig)
    assert (config.patch_size, config.window_size, config.image_size, config.embed_dim) == (2, 4, 32, 96)
    assert (config.num_classes, config.stochastic, config.features) == (10, True, 768)
    nano = model_config("swin_nano_patch2_window4_32")
    assert isinstance(nano, SwinConfig)
    assert [(stage.grid, stage.width, stage.windows) for stage in nano.stages] == [
        (16, 32, 16),
        (8, 64, 4),
        (4, 128, 1),
    ]
    assert [nano.stages[0].shift(i) for i in (0, 1)] == [0, 2]
    assert nano.stages[2].shift(5) == 0


def test_lists_of_a_recipe_become_tuples() -> None:
    assert swin(depths=[2, 2], num_heads=[2, 4]) == swin()
    assert hash(swin(depths=[2, 2], num_heads=[2, 4])) == hash(swin())


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"depths": (2, 2, 2)}, "depths of swin_custom are 3 but num_heads are 2: list one of each for each stage"),
    ({"depths": (), "num_heads": ()}, "depths of swin_custom is (): list one number for each stage"),
    ({"depths": (2, 0)}, "stage 2 of swin_custom has 0 blocks: it must have 1 or more"),
    ({"depths": (1000, 1000)}, "depth of swin_custom is 2000: it must be from 1 to 1,024"),
    (
        {"num_heads": (2, 3)},
        "3 heads do not divide the width 16 of stage 2 of swin_custom: change num_heads or embed_dim",
    ),
    (
        {"embed_dim": 131_072, "mlp_ratio": 0.5},
        "stage 2 of swin_custom has width 262144, above 131,072: use fewer stages",
    ),
    ({"mlp_ratio": 0.01}, "stage 1 of swin_custom has 0 hidden features: change mlp_ratio"),
    ({"mlp_ratio": math.nan}, "mlp_ratio of swin_custom is nan: it must be above 0"),
    ({"patch_size": 3}, "patches of 3 pixels do not tile images of 16 for swin_custom: use an image size of 15"),
    (
        {"image_size": 18},
        "windows of 4x4 do not tile the 9x9 tokens of stage 1 of swin_custom: use an image size of 16 or 32, or",
    ),
    (
        {"image_size": 24},
        "windows of 4x4 do not tile the 6x6 tokens of stage 2 of swin_custom: use an image size of 16 or 32",
    ),
    (
        {"image_size": 20, "window_size": 5, "depths": (1, 1, 1), "num_heads": (1, 1, 1)},
        "stage 2 of swin_custom has 5x5 tokens, which cannot be merged two by two: use an image size of 8 or 40, or",
    ),
    ({"image_size": 14, "window_size": 7}, "stage 1 of swin_custom has 7x7 tokens, which cannot be merged two by two"),
    ({"init": "jax"}, "unknown init 'jax' of swin_custom: use timm or perturbed"),
    ({"image_size": 16_384, "patch_size": 8, "window_size": 8}, "images of swin_custom have 4194304 tokens, above"),
    ({"pool": "avg"}, "unknown model option 'pool' of swin_custom: options are channels, depths, "),
)


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=str)
def test_sizes_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        swin(**options)


@pytest.mark.parametrize("window", [1, 3, 4, 6])
def test_suggested_image_sizes_are_the_nearest_that_fit(window: int) -> None:
    refusals = {size: refusal(size, window) for size in range(2, 400, 2)}
    fit = [size for size, message in refusals.items() if message is None]
    assert fit
    for size in (size for size in range(2, 82, 2) if size not in fit):
        below, above = max((other for other in fit if other < size), default=None), min(o for o in fit if o > size)
        suggested = f"{below} or {above}" if below else f"{above}"
        assert f"use an image size of {suggested}, or" in str(refusals[size])


def refusal(image_size: int, window: int) -> str | None:
    try:
        swin(image_size=image_size, window_size=window, depths=(1, 1, 1), num_heads=(1, 1, 1))
    except ModelError as error:
        return str(error)
    return None


def test_unknown_names_are_refused() -> None:
    for name in ("swin_tiny", "swin_giant_patch4_window7_224", "swin_tiny_patch4_window7_" + "9" * 5_000):
        with pytest.raises(ModelError, match="unknown model 'swin_"):
            model_config(name)
    with pytest.raises(ModelError, match="swin_custom needs the model options num_heads, patch_size"):
        model_config("swin_custom", embed_dim=8, depths=(1,))


def microsofts(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of timm's model as Microsoft's files have them."""
    state = {}
    for name, tensor in model.state_dict().items():
        name = re.sub(r"layers\.(\d+)\.downsample", lambda found: f"layers.{int(found[1]) - 1}.downsample", name)
        state[name.replace("head.fc.", "head.")] = tensor
    for name, module in model.named_modules():
        if name.endswith(".attn"):
            state[f"{name}.relative_position_index"] = module.relative_position_index
        elif getattr(module, "attn_mask", None) is not None:
            state[f"{name}.attn_mask"] = module.attn_mask
    return state


def older_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return transformers' weights under the names of version 4."""
    older = {}
    for name, tensor in state.items():
        name = re.sub(r"attention\.([qkv])_proj", lambda found: f"attention.self.{WORDS[found[1]]}", name)
        name = name.replace("attention.relative_position_bias.", "attention.self.")
        name = name.replace("attention.o_proj", "attention.output.dense").replace("mlp.fc1", "intermediate.dense")
        older[name.replace("mlp.fc2", "output.dense")] = tensor
    return older


WORDS = {"q": "query", "k": "key", "v": "value"}
FOREIGN: dict[str, Callable[[SwinConfig], Mapping[str, Tensor]]] = {
    "timm": lambda config: timm_swin(config).state_dict(),
    "microsoft": lambda config: microsofts(timm_swin(config)),
    "transformers": lambda config: transformers_(config).state_dict(),
    "transformers 4": lambda config: older_names(transformers_(config).state_dict()),
}


@pytest.mark.parametrize("source", FOREIGN)
@pytest.mark.parametrize("case", ["odd window, odd depths", "four stages", "one window in the last stage"])
def test_configuration_is_inferred(source: str, case: str) -> None:
    config, state = CASES[case], FOREIGN[source](CASES[case])
    assert found_in(state, config).format == source.removesuffix(" 4")
    assert inferred(state, image_size=config.image_size) == replace(config, init="timm")
    assert converted(state, config).keys() == dict(LayeredModel(config).named_parameters()).keys()


def test_image_size_is_inferred_from_masks_windows_and_names() -> None:
    assert inferred(microsofts(timm_swin(swin(image_size=64)))).image_size == 64
    smaller = inferred(timm_swin(swin(image_size=12, window_size=6)).state_dict())
    assert (smaller.image_size, smaller.window_size) == (12, 6)
    with torch.device("meta"):
        for name in ("swin_tiny_patch4_window7_224", "swin_base_patch4_window12_384"):
            state = timm.create_model(name).state_dict()
            assert replace(inferred(state), name=name) == model_config(name) == inferred(state, name)
        # Windows of 50 tokens are larger than every stage.
        for name in ("swin_tiny_patch4_window7_448", "swin_tiny_patch2_window50_16"):
            config = model_config(name)
            assert isinstance(config, SwinConfig)
            assert inferred(timm_swin(config).state_dict(), name) == config
        assert inferred(timm_swin(config).state_dict()) == replace(config, name="swin_custom", window_size=8)


@pytest.mark.parametrize("hidden", [1, 2, 7, 48, 49, 50, 97, 113, 119])
def test_mlp_ratio_is_inferred_from_hidden_features(hidden: int) -> None:
    ratio = math.nextafter(hidden / 49, math.inf)  # int(49 * (1 / 49)) is 0
    config = swin(embed_dim=49, depths=(1, 1), num_heads=(1, 1), mlp_ratio=ratio)
    found = inferred(timm_swin(config).state_dict(), image_size=16)
    assert [stage.mlp_hidden_dim for stage in found.stages] == [stage.mlp_hidden_dim for stage in config.stages]


def test_tensors_of_other_models_are_recognised_or_refused() -> None:
    assert WEIGHTS.renamed({"patch_embed.proj.weight": (8, 3, 4, 4), "blocks.0.attn.qkv.weight": (24, 8)}) is None
    state = shapes_of(timm_swin(CASES["shifted in both stages"]).state_dict())
    odd = {**state, "layers.0.blocks.0.mlp.gate.weight": (3,), "absolute_pos_embed": (1, 256, 8)}
    with pytest.raises(DataError, match=r"has layers.0.blocks.0.mlp.gate.weight, absolute_pos_embed, which vitpar's"):
        recognised("x", odd)


@pytest.mark.parametrize(
    ("change", "said", "model", "message"),
    [
        ({}, {}, "vit_tiny_patch4_32", "'x' is a Swin Transformer, not a vit_tiny_patch4_32"),
        ({}, {}, "swin_tiny_patch2_window4_32", "its embed_dim is 8 instead of 96: name another model"),
        ({}, {"image_size": 18}, None, "'x' is not a vitpar model: windows of 4x4 do not tile the 9x9 tokens"),
        ({"patch_embed.proj.weight": (8, 1, 2, 2)}, {}, None, "'x' has 1 input channels"),
        ({"patch_embed.proj.weight": ()}, {}, None, "has shape []: it is not a Swin Transformer that vitpar supports"),
        ({"layers.1.blocks.0.mlp.fc1.weight": None}, {}, None, "lacks stages.1.0.mlp.fc1.weight (vitpar's name)"),
        ({f"layers.{i}.blocks.0.norm1.bias": () for i in range(99)}, {}, None, "'x' has 99 stages: models with more"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    change: dict[str, Any], said: dict[str, Any], model: str | None, message: str
) -> None:
    state = shapes_of(timm_swin(CASES["shifted in both stages"]).state_dict()) | change
    found = WEIGHTS.renamed({name: shape for name, shape in state.items() if shape is not None})
    assert found is not None
    with pytest.raises((DataError, ModelError), match=re.escape(message)):
        WEIGHTS.infer_config("x", found, said, model)


def test_drop_path_is_timms_rule_and_depends_only_on_the_sample_key() -> None:
    config = swin(depths=(2, 3), drop_path=0.4)
    model = filled(config).train()
    rates = [
        getattr(block.drop_path1, "drop_prob", 0.0) for stage in timm_swin(config).layers for block in stage.blocks
    ]
    assert [block.rate.item() for block in model.blocks.values()] == pytest.approx(rates)
    images = torch.randn(1, 3, 16, 16).expand(8, -1, -1, -1)
    together = model(images, KEYS)
    alone = torch.cat([model(images[i : i + 1], KEYS[i : i + 1]) for i in range(8)])
    torch.testing.assert_close(together, alone)
    assert len({tuple(row.tolist()) for row in together.detach()}) > 4
    torch.testing.assert_close(model.eval()(images, KEYS), model(images))


def test_each_residual_branch_is_dropped_by_its_own_random_numbers() -> None:
    block = filled(swin(depths=(2, 3), drop_path=0.4)).blocks["3"].train()
    x, rate = torch.randn(8, 16, 16), 0.4 * 3 / 4
    places = [1 + 4 * 3 + 1, 1 + 4 * 3 + 3]  # after embed's, and four for each block before
    first, second = (at_place(KEYS, torch.tensor(place)) for place in places)
    expected = x + drop(block.attn(block.norm1(x)), first, rate, whole_sample=True)
    expected = expected + drop(block.mlp(block.norm2(expected)), second, rate, whole_sample=True)
    torch.testing.assert_close(block(x, KEYS), expected)


def test_perturbed_start_has_no_zero_gradient() -> None:
    model = filled(swin(image_size=32)).train()
    F.cross_entropy(model(torch.randn(8, 3, 32, 32), KEYS), torch.arange(8) % 3).backward()
    assert [name for name, p in model.named_parameters() if not p.grad.any()] == []


def test_low_precision_attention_gets_a_mask_of_its_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs refuse another dtype."""
    dtypes, compute = set(), F.scaled_dot_product_attention

    def noted(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor) -> Tensor:
        dtypes.update({q.dtype, attn_mask.dtype})
        return compute(q, k, v, attn_mask)

    model = filled(swin(image_size=32))
    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    for parameter in model.parameters():  # as FSDP casts them; buffers stay in float32
        parameter.data = parameter.data.bfloat16()
    logits = model(torch.randn(2, 3, 32, 32).bfloat16())
    logits.sum().backward()
    assert dtypes == {torch.bfloat16} == {logits.dtype, *(p.grad.dtype for p in model.parameters())}
