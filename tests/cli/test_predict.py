"""`vitpar predict`: the classes of image files, as evaluation computes them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.command_line import Command, Refused
from helpers.shared_runs import shared_run
from helpers.small_data import CLASSES, VAL
from vitpar import Run, UserError, create_model
from vitpar.data.images import decode
from vitpar.data.transforms.batch import Normalize
from vitpar.data.transforms.sample import EvalTransform
from vitpar.errors import DataError
from vitpar.models.layers import LayeredModel
from vitpar.weights.folder import open_weights


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with images, one of them damaged, and a run that was trained on its data."""
    shared = shared_run("small", tmp_path_factory)
    folder = shutil.copytree(shared, tmp_path_factory.mktemp("predict") / "place")
    shutil.copytree(folder / "source" / "val", folder / "images")
    Image.new("RGB", (30, 9), (200, 30, 60)).save(folder / "wide.jpg")
    (folder / "images" / "class3" / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(20))
    return folder


def by_hand(path: Path, weights: Path) -> dict[str, float]:
    """Return the probability of each class, by name, from the evaluation's transform and the plain model."""
    opened = open_weights(weights)
    model = LayeredModel(opened.config).eval()
    model.load_state_dict({name: opened.read(name) for name in dict(model.named_parameters())}, strict=False)
    prepare, normalize = EvalTransform(8, 0.7, "bilinear"), Normalize((0.3, 0.4, 0.5), (0.2, 0.3, 0.4))
    with torch.no_grad():
        shares = model(normalize(prepare(decode(path.read_bytes())))[None]).softmax(dim=1)[0]
    return {f"class{number}": float(share) for number, share in enumerate(shares)}


def predicted(done: Any) -> dict[str, Any]:
    return {row["image"]: row for row in json.loads(done.stdout)["images"]}


def test_probabilities_are_those_of_evaluation(place: Path, vitpar: Command) -> None:
    done = vitpar("predict", "images", "wide.jpg", "--checkpoint", "run", "--top", "9", "--batch-size", "4", "--json")
    assert done.returncode == 1, done.stderr
    rows = predicted(done)
    assert list(rows)[-1] == "wide.jpg" and len(rows) == VAL + 2
    bad = rows.pop("images/class3/bad.png")["error"]
    assert done.stderr == f"error: {bad}\n" and bad.startswith("'images/class3/bad.png': ")
    for path, row in rows.items():
        shares = [one["probability"] for one in row["classes"]]
        assert shares == sorted(shares, reverse=True) and sum(shares) == pytest.approx(1)
        assert [one["name"] for one in row["classes"]] == [f"class{one['class']}" for one in row["classes"]]
        expected = by_hand(place / path, place / "run" / "weights")
        assert {one["name"]: one["probability"] for one in row["classes"]} == pytest.approx(expected, rel=1e-4)
    assert max(one["classes"][0]["probability"] for one in rows.values()) > 1.2 / CLASSES


def test_a_run_computes_in_python_what_commands_compute(place: Path, tmp_path: Path, vitpar: Command) -> None:
    run, images = Run(place / "run"), sorted(str(path) for path in (place / "images" / "class0").iterdir())
    done = vitpar("predict", *images, "--checkpoint", "run", "--json")
    assert run.predict(*images) == list(predicted(done).values())
    with pytest.raises(DataError, match=r"bad\.png': .*: leave it out"):
        run.features(place / "images")
    features = run.features(*images)
    head = create_model(weights=run.weights).head
    logits = head.fc(torch.from_numpy(features)).detach().double()
    assert [row["classes"][0]["class"] for row in run.predict(*images)] == logits.argmax(1).tolist()
    evaluated = run.evaluate(place / "data")
    assert evaluated == json.loads(vitpar("eval", "--checkpoint", "run", "--json").stdout)
    metrics = run.metrics
    assert metrics["step"].tolist() == [1, 2, 3, 4] and np.isnan(metrics["val_loss"][:2]).all()
    assert metrics["val_loss"][-1] == run.summary["loss"] == pytest.approx(evaluated["loss"], rel=1e-6)
    assert np.isfinite(metrics["loss"]).all() and not any(np.isnan(column).all() for column in metrics.values())
    assert (str(run.plan), run.settings.train.steps) == ("dp1", 4)
    for words in (repr(run), run._repr_html_()):
        assert all(word in words for word in (str(run.folder), "complete", "dp1", f"{metrics['val_loss'][-1]:.4g}"))
    run.report(tmp_path / "report.html")
    assert "<h1>run" in (tmp_path / "report.html").read_text()


def test_a_plain_model_has_the_runs_weights_or_a_new_classifier(place: Path) -> None:
    models = [create_model(weights=place / "run", num_classes=number) for number in (None, 3)]
    ours, other = (dict(model.named_parameters()) for model in models)
    assert other.pop("head.fc.weight").shape[0] == other.pop("head.fc.bias").shape[0] == 3
    read = open_weights(place / "run" / "weights").read
    assert all(torch.equal(p, ours[name]) and torch.equal(p, read(name)) for name, p in other.items())
    images, model = torch.randn(64, 3, 8, 8), models[0]
    assert not torch.equal(model(images), model(images)), "paths are dropped in training"
    assert torch.equal(model.eval()(images), model(images))
    with pytest.raises(UserError, match="embed_dim is 192 but"):
        create_model("vit_tiny_patch16_224", weights=place / "run")
    with pytest.raises(UserError, match="a model needs a name or weights"):
        create_model()


def test_a_checkpoint_predicts_with_its_averages_and_names(place: Path, vitpar: Command) -> None:
    """Without names in the weights, those of the data are used; without either, numbers."""
    checkpoint = place / "run" / "checkpoints" / "step_4"
    assert json.loads((checkpoint / "classes.json").read_text()) == [f"class{number}" for number in range(CLASSES)]
    for name in ("unnamed", "numbers"):
        shutil.copytree(place / "run" / "weights", place / name)
        (place / name / "classes.json").unlink()
    recipe = place / "numbers" / "recipe.toml"
    recipe.write_text(recipe.read_text().replace('path = "data"', 'path = "gone"'))
    first, second, third = (
        predicted(vitpar("predict", "wide.jpg", "--checkpoint", folder, "--json"))["wide.jpg"]["classes"]
        for folder in (str(checkpoint), "unnamed", "numbers")
    )
    assert len(first) == 5 and [one["name"] for one in first] == [f"class{one['class']}" for one in first]
    for one in (*first, *second, *third):
        one["probability"] = pytest.approx(one["probability"], rel=1e-5)
    assert first == second
    assert third == [one | {"name": None} for one in first]


MISTAKES = [
    (["gone.jpg", "--checkpoint", "run"], "there is no image 'gone.jpg': name image files, or folders of them"),
    (["empty", "--checkpoint", "run"], "'empty' holds no images (.jpg, .jpeg, "),
    (["wide.jpg", "--checkpoint", "run", "--set", "train.seed=1"], "--set train.seed changes nothing in a prediction"),
    (["wide.jpg", "--checkpoint", "few"], "'few/classes.json' has 1 names but the model has 7 classes: remove it"),
    (["wide.jpg", "--checkpoint", "odd"], "'odd/classes.json' is not a list of names: remove it to use numbers"),
]


def test_mistakes_are_refused(place: Path, refused: Refused) -> None:
    (place / "empty").mkdir(exist_ok=True)
    for name, text in (("few", '["one"]'), ("odd", '{"0": "one"}')):
        shutil.copytree(place / "run" / "weights", place / name, dirs_exist_ok=True)
        (place / name / "classes.json").write_text(text)
    refused(place, MISTAKES, "predict")
