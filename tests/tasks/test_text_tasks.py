"""Tasks of text: inputs and targets by hand, training under plans, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from helpers.ranks import Ranks
from helpers.trained import rows, train
from vitpar import parse, validate
from vitpar.check import check_plan, recipe_to_check
from vitpar.data.text.loader import TextLoader
from vitpar.data.text.masking import span_lengths
from vitpar.data.text.pack import pack_text
from vitpar.data.text.text_set import TextSet
from vitpar.errors import RecipeError
from vitpar.models import IGNORED, ModelConfig, model_config
from vitpar.models.initial import initialise
from vitpar.models.layers import LayeredModel
from vitpar.recipe import Recipe, read_recipe
from vitpar.recipe.request import classes_of
from vitpar.tasks import task_of
from vitpar.tasks.data import model_of
from vitpar.tasks.text import TextTask
from vitpar.training.prepare import prepare

LINE = "the cat sat on a mat and saw nine mice run past its tail in one long quiet line"
MODELS: dict[str, dict[str, Any]] = {
    "mlm": {"model.name": "bert_custom", "model.embed_dim": 16, "model.depth": 3, "model.num_heads": 4},
    "span": {
        **{"model.name": "t5_custom", "model.embed_dim": 16, "model.depth": 2, "model.num_heads": 4},
        **{"model.head_dim": 4, "model.decoder_depth": 2},
    },
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return packed text of 60 documents of different lengths, and a last validation batch that is not full."""
    place, draw = tmp_path_factory.mktemp("text"), np.random.default_rng(0)
    for split, number in (("train", 60), ("val", 21)):
        lines = [" ".join(draw.choice(LINE.split(), draw.integers(3, 9))) for _ in range(number)]
        (place / f"{split}.txt").write_text("\n".join(lines))
    pack_text(place, place / "packed", 20, documents="line")
    return place / "packed"


def recipe_of(text: Path, task: str, mesh: str, **more: Any) -> Recipe:
    values = {"data.path": str(text), "task.name": task, **MODELS[task], "parallel.mesh": mesh}
    values |= {"train.batch_size": 16, "train.steps": 4, "train.log_every": 1, "train.eval_every": 2}
    return read_recipe(None, {**values, "train.precision": "fp64", "checkpoint.every": 2, **more})


@pytest.mark.parametrize("task", ["mlm", "span"])
def test_every_token_is_in_the_inputs_or_the_targets(task: str, text: Path) -> None:
    """Filling the gaps of the inputs with the targets gives the sequence between its special tokens."""
    shards = TextSet.open(text, "train")
    trained = task_of(recipe_of(text, task, "dp1"), shards)
    assert isinstance(trained, TextTask)
    ids, lengths = shards.read_batch(np.arange(8))
    prepared = trained.prepare(ids, lengths, np.arange(8))
    specials = shards.specials
    for row in range(8):
        inputs = prepared.inputs[row][: prepared.lengths[row]].tolist()
        targets = [number for number in prepared.targets[row].tolist() if number != IGNORED]
        if task == "mlm":
            assert inputs[0] == specials.cls and inputs[-1] == specials.end
            whole = [old if new == IGNORED else new for old, new in zip(inputs, prepared.targets[row], strict=False)]
            assert whole[1:-1] == ids[row][: lengths[row]].tolist()
            assert len(targets) == max(1, round(0.15 * lengths[row]))
        else:
            assert inputs[-1] == targets[-1] == specials.end
            shifted = prepared.sides["decoder_input_ids"][row].tolist()
            assert shifted[0] == specials.padding and shifted[1 : len(targets)] == targets[:-1]
            spans: dict[int, list[int]] = {}
            for number in targets[:-1]:
                if number in specials.sentinels:
                    spans[number] = []
                else:
                    spans[[*spans][-1]].append(number)
            whole = [part for number in inputs[:-1] for part in spans.get(number, [number])]
            assert whole == ids[row][: lengths[row]].tolist()
    if task == "span":
        assert (prepared.inputs.shape[1], prepared.targets.shape[1]) == span_lengths(20)


def test_loss_and_accuracy_are_means_over_tokens_to_predict() -> None:
    task = task_of(recipe_to_check({"task.name": "mlm"}), 64)
    outputs = torch.randn(3, 8, task.outputs, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = outputs.argmax(-1)
    targets[0] = IGNORED
    targets[1, :4] = (targets[1, :4] + 1) % task.outputs  # 4 of 16 are wrong
    found = task.result(task.sums(outputs, targets))
    assert found == pytest.approx({"accuracy": 0.75, "loss": F.cross_entropy(outputs[1:].mT, targets[1:]).item()})


def numbers(row: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if isinstance(value, int | float)}


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def trained_run(device: torch.device, recipe: Recipe, run: Path, resume: Path | None = None) -> None:
    train(device, recipe, run, **({} if resume is None else {"resume": resume}))


@pytest.mark.parametrize("task", ["mlm", "span"])
def test_plans_do_not_change_the_training(task: str, text: Path, tmp_path: Path, ranks: Ranks) -> None:
    """Counts of targets differ between micro-batches and ranks. The last evaluation is compared with a plain loop."""
    (_,) = ranks(1).run(trained_run, recipe_of(text, task, "dp1"), tmp_path / "dp1")
    expected = rows(tmp_path / "dp1"), rows(tmp_path / "dp1", "eval")
    plans = [("pp2xtp2", {"parallel.microbatches": 2}), ("dp2xtp2+sp", {})]
    for number, (mesh, more) in enumerate(plans):
        recipe = recipe_of(text, task, mesh, **more)
        ranks(parse(mesh).world_size).run(trained_run, recipe, tmp_path / str(number))
        for mine, theirs in zip(
            (rows(tmp_path / str(number)), rows(tmp_path / str(number), "eval")), expected, strict=True
        ):
            for one, other in zip(mine, theirs, strict=True):
                assert numbers(one) == pytest.approx(numbers(other), rel=1e-9), mesh
        saved, other = (weights_in(tmp_path / name / "weights") for name in (str(number), "dp1"))
        assert saved.keys() == other.keys(), "the vocabulary is saved complete, and shared tensors once"
        assert all(torch.allclose(saved[name], other[name], rtol=1e-6, atol=1e-9) for name in other), mesh
    # Resumed under another plan.
    recipe = recipe_of(text, task, "fsdp2")
    ranks(2).run(trained_run, recipe, tmp_path / "moved", tmp_path / "dp1" / "checkpoints" / "step_2")
    assert rows(tmp_path / "moved")[-1]["loss"] == pytest.approx(expected[0][-1]["loss"], rel=1e-9)

    shards = TextSet.open(text, "val")
    recipe = recipe_of(text, task, "dp1")
    trained = task_of(recipe, shards)
    assert isinstance(trained, TextTask)
    config = recipe.config(trained.outputs, trained.model_options)
    model = LayeredModel(config).double().eval()
    initialise(model, 0, config)  # fills buffers
    model.load_state_dict(weights_in(tmp_path / "dp1" / "weights"), strict=False)
    model.tie()
    losses, hits = [], []
    for batch in TextLoader(shards, batch_size=1, workers=0):
        given = trained.given(trained.prepare(batch.ids.numpy(), batch.lengths.numpy(), batch.keys.numpy()), config)
        with torch.no_grad():
            logits = model(given.images, None, **given.sides)[0]
        wanted = given.targets[0] != IGNORED
        losses += F.cross_entropy(logits[wanted], given.targets[0][wanted], reduction="none").tolist()
        hits += (logits[wanted].argmax(-1) == given.targets[0][wanted]).tolist()
    last = expected[1][-1]
    assert last["samples"] == len(shards)
    assert last["loss"] == pytest.approx(np.mean(losses), rel=1e-6) and last["accuracy"] == np.mean(hits)


def test_check_compares_with_the_second_formula(monkeypatch: pytest.MonkeyPatch, alone: None) -> None:
    total = TextTask.total
    recipe = recipe_to_check({"task.name": "mlm", "train.precision": "fp64"})
    trained = task_of(recipe, 64)
    config = recipe.config(trained.outputs, trained.model_options)
    monkeypatch.setattr(TextTask, "total", lambda self, outputs, targets: 1.001 * total(self, outputs, targets))
    plan = validate(parse("dp1"), config, 16)
    assert not check_plan(recipe, config, plan, torch.device("cpu"), trained, recipe_steps=0).passed


def test_check_and_bench_without_reading_take_the_vocabulary_of_the_data(text: Path) -> None:
    recipe = recipe_of(text, "mlm", "dp1")
    assert [classes_of(recipe, None, 64), classes_of(recipe, 70, 64)] == [TextSet.open(text, "train").vocab_size, 70]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model.name": "vit_nano_patch4_16"}, r"task 'mlm' reads text, but vit_\S+ takes images: name a model"),
        ({"task.name": "span"}, r"task 'span' needs a decoder, which bert_custom does not have"),
        ({"model.vocab_size": 100}, r"has a vocabulary of 100 tokens, but the text has 362: set model.vocab_size"),
        ({"model.tokens": 8}, r"has tokens 8, but the task needs 22 for sequences of 20 ids: set model.tokens"),
        ({"task.options": {"rate": 2.0}}, r"task 'mlm' cannot be made: rate is 2.0, which is not between 0 and 1"),
    ],
)
def test_what_does_not_fit_is_refused_before_training(settings: dict[str, Any], words: str, text: Path) -> None:
    model = {} if "model.name" in settings else MODELS["mlm"]
    values = {"data.path": str(text), "task.name": "mlm", "train.steps": 1, "train.batch_size": 4, **model}
    with pytest.raises(RecipeError, match=words):
        prepare(read_recipe(None, {**values, **settings}))


@pytest.mark.parametrize(
    ("task", "model", "sizes"),
    [
        ("mlm", model_config("bert_large"), (510, 512, 0)),
        ("span", model_config("t5_base"), (568, 512, 114)),
        ("span", model_config("t5_base", tokens=64), (70, 64, 14)),
    ],
)
def test_without_data_sequences_fill_the_model(task: str, model: ModelConfig, sizes: tuple[int, int, int]) -> None:
    """`vitpar bench --synthetic` once timed BERT-large with 16 tokens."""
    full = task_of(recipe_to_check({"task.name": task}), model.num_classes).filling(model)
    assert isinstance(full, TextTask)
    options = full.model_options
    assert (full.text.tokens, options["tokens"], options.get("decoder_tokens", 0)) == sizes


def test_plans_and_prices_have_the_sizes_of_the_text(text: Path) -> None:
    """A search once priced a BERT of 362 tokens with 30,522."""
    recipe = recipe_of(text, "span", "dp1")
    sizes = [model_of(recipe, classes, 1000) for classes in (None, 100)]
    assert [(one.num_classes, one.input.shape, one.output_shape[0]) for one in sizes] == [
        (362, (19,), 5),
        (100, (19,), 5),
    ]
    unpacked = recipe_of(text.parent, "mlm", "dp1")
    assert model_of(unpacked, None, 1000).num_classes == model_config("bert_base").num_classes
