"""Parts of a training step: weight decay, moving average, weights."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.oracles import timm
from helpers.plans import EVERYTHING
from helpers.ranks import Ranks
from vitpar import Execution, ParallelModel, ViTConfig, model_config, parallelize, parse, validate
from vitpar.errors import DataError
from vitpar.models.initial import initialise
from vitpar.models.layers import LayeredModel
from vitpar.recipe import Recipe, read_recipe
from vitpar.recipe.sections.training import OptimizerSection
from vitpar.training.build import build
from vitpar.training.optim.average import EMA
from vitpar.training.optim.optimizer import ShardedOptimizer, decays
from vitpar.weights.folder import CONFIG, INDEX, RECIPE, load_weights, open_weights, save_weights

BATCH, CPU = 8, torch.device("cpu")
IMAGES = torch.randn(BATCH, 3, 8, 8, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(BATCH) % 3


def config_of(**options: Any) -> ViTConfig:
    sizes = {"image_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 3}
    return model_config("vit_custom", **{**sizes, "init": "perturbed", **options})


def recipe(**settings: Any) -> Recipe:
    return read_recipe(None, {"data.path": "x", "train.steps": 1, "train.precision": "fp32", **settings})


def built(device: torch.device, mesh: str, seed: int = 0, **options: Any) -> ParallelModel:
    config = config_of(**options)
    return parallelize(config, validate(parse(mesh), config, BATCH), Execution(BATCH, seed=seed), device)


def backward(model: ParallelModel) -> None:
    model.forward_backward(IMAGES[model.image_rows(BATCH)] if model.takes_images else None, LABELS, torch.arange(BATCH))


def one_process(seed: int = 0, **options: Any) -> LayeredModel:
    """Return the plain model."""
    config = config_of(**options)
    model = LayeredModel(config)
    initialise(model, seed, config)
    return model


# weight decay and optimizers


def test_only_matrices_decay() -> None:
    config = config_of(**EVERYTHING, representation_size=12)
    parameters = dict(LayeredModel(config).named_parameters())
    decaying = {name.removeprefix("blocks.0.") for name, p in parameters.items() if decays(p)}
    decaying = {name for name in decaying if not name.startswith("blocks.1.")}
    inside = {"attn.qkv.weight", "attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight"}
    assert decaying == inside | {
        "embed.patch_embed.proj.weight",
        "head.representation.weight",
        "head.fc.weight",
        "head.fc_dist.weight",
    }


# moving average


def test_averages_replace_the_parameters_only_inside_the_block(alone: None) -> None:
    """Plans, and the averages themselves, are compared with one process by the check."""
    model = built(CPU, "dp1")
    ema = EMA(model, 0.9)
    backward(model)
    ShardedOptimizer(model.named_parameters(), OptimizerSection(name="sgd", weight_decay=0)).step(0.5)
    ema.update(1)
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    averages = {name: average.clone() for name, average in ema.average.items()}
    logits = [model.predict(IMAGES, BATCH)]
    with ema.averaged():
        assert all(torch.equal(p, averages[name]) for name, p in model.named_parameters())
        logits.append(model.predict(IMAGES, BATCH))
    logits.append(model.predict(IMAGES, BATCH))
    assert all(torch.equal(p, own[name]) for name, p in model.named_parameters())
    assert torch.equal(logits[0], logits[2]) and not torch.allclose(logits[0], logits[1], atol=1e-4)


@pytest.mark.parametrize(("decay", "warmup"), [(0.9, False), (0.9, True), (0.3, True)])
def test_ema_matches_timm(decay: float, warmup: bool, alone: None) -> None:
    """The average equals timm's ModelEmaV3 after every update, with and without the decay warm-up.

    Without a warm-up timm's trainer, unlike vitpar, starts from the parameters after the first step.
    """
    config = config_of()
    model = parallelize(config, validate(parse("dp1"), config, BATCH), Execution(BATCH, precision="fp64"), CPU)
    theirs = nn.ParameterList(p.detach().clone() for _, p in model.named_parameters())
    average = timm.utils.ModelEmaV3(theirs, decay=decay, use_warmup=warmup)
    ours = EMA(model, decay, warmup)
    for step in range(1, 40):
        for (_, p), q in zip(model.named_parameters(), theirs, strict=True):
            p.data.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64))
            q.data.copy_(p.data)
        ours.update(step)
        average.update(theirs, step=step if warmup else None)
        for mine, other in zip(ours.average.values(), average.module, strict=True):
            torch.testing.assert_close(mine, other.detach(), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("warmup", "decay"), [(True, 0.75), (False, 0.9)])
def test_ema_warmup_setting_reaches_the_training_step(warmup: bool, decay: float, alone: None) -> None:
    """A training step uses the warmed-up decay, which after update 8 is 1 - 8^(-2/3) = 0.75."""
    settings = {"train.ema_decay": 0.9, "train.ema_warmup": warmup, "train.batch_size": BATCH}
    config = config_of()
    parts = build(recipe(**settings), config, validate(parse("dp1"), config, BATCH), CPU)
    assert parts.ema is not None
    before = {name: average.clone() for name, average in parts.ema.average.items()}
    parts.step()(8, 0.1, IMAGES, LABELS, torch.arange(BATCH))
    for name, p in parts.model.named_parameters():
        expected = decay * before[name] + (1 - decay) * p.detach()
        torch.testing.assert_close(parts.ema.average[name], expected, atol=1e-6, rtol=1e-5)


# weights


def write(device: torch.device, mesh: str, folder: Path) -> None:
    """Save the weights of seed 3 under `mesh`; runs on every rank."""
    save_weights(built(device, mesh, seed=3, **EVERYTHING), folder, recipe().to_toml())


def logits_of(device: torch.device, mesh: str, folder: Path) -> tuple[list[int], list[list[float]]] | None:
    """Load `folder` into a model of seed 4 and return its rows and logits; runs on every rank."""
    model = built(device, mesh, seed=4, **EVERYTHING)
    load_weights(model, folder)
    logits = model.predict(IMAGES[model.image_rows(BATCH)] if model.takes_images else None, BATCH)
    model.parameters_changed()
    return None if logits is None else (model.output_rows(BATCH), logits.tolist())


@pytest.mark.parametrize(("writes", "reads"), [("tp2xfsdp2", "pp2"), ("dp1", "tp2xfsdp2"), ("pp2xtp2", "fsdp2")])
def test_weights_load_under_another_plan(writes: str, reads: str, tmp_path: Path, ranks: Ranks) -> None:
    """One plan saves, another loads, and the logits equal those of the unsharded model."""
    folder = tmp_path / "step_1"
    ranks(parse(writes).world_size).run(write, writes, folder)
    answers = ranks(parse(reads).world_size).run(logits_of, reads, folder)
    expected = one_process(seed=3, **EVERYTHING).eval()(IMAGES)
    given = [answer for answer in answers if answer is not None]
    assert {row for rows, _ in given for row in rows} == set(range(BATCH))
    for rows, logits in given:
        torch.testing.assert_close(torch.tensor(logits), expected[rows], atol=1e-5, rtol=1e-4)
    assert open_weights(folder).config == config_of(**EVERYTHING)
    assert read_recipe(folder / RECIPE) == recipe()
    files = {path.name for path in folder.iterdir()}
    stages = parse(writes).pipeline_degree
    parts = {f"model-{i:05d}-of-{stages:05d}.safetensors" for i in range(1, stages + 1)}
    assert files == {INDEX, CONFIG, RECIPE} | parts
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"], "something half-written is left"


@pytest.fixture
def saved(tmp_path: Path, alone: None) -> tuple[ParallelModel, Path]:
    """Return a model in one process and the folder of its weights."""
    folder = tmp_path / "step_1"
    model = built(CPU, "dp1")
    save_weights(model, folder, recipe().to_toml())
    return model, folder


def test_weights_that_cannot_be_written_are_an_error_of_their_file(saved: tuple[ParallelModel, Path]) -> None:
    """safetensors raises an error of its own, which the command line would not know."""
    model, folder = saved
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            save_weights(model, folder, recipe().to_toml())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert Path(caught.value.filename).name == "model-00001-of-00001.safetensors"


def test_damaged_and_other_weights_are_refused_in_one_line(saved: tuple[ParallelModel, Path]) -> None:
    model, folder = saved
    (folder / "old").touch()
    (folder.with_name("step_1.partial")).mkdir()
    save_weights(model, folder, recipe().to_toml())  # replaces the folder
    assert not (folder / "old").exists() and not folder.with_name("step_1.partial").exists()
    with pytest.raises(DataError, match=r"head.fc.weight has shape \[3, 24\] but the model has \[5, 24\]"):
        load_weights(built(CPU, "dp1", num_classes=5), folder)
    with pytest.raises(DataError, match=r"it lacks blocks\.2\.norm1\.weight"):
        load_weights(built(CPU, "dp1", depth=3), folder)
    part = folder / "model-00001-of-00001.safetensors"
    part.write_bytes(part.read_bytes()[:1000])
    with pytest.raises(DataError, match="cannot be read") as caught:
        load_weights(model, folder)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"holds no weights \(config.json is missing\)"):
        open_weights(folder / "nowhere")
