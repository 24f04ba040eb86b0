"""Commands that take a model and data match their classes by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
import torch

from helpers.command_line import Command, Refused
from helpers.shared_runs import shared_run
from helpers.small_data import CLASSES, rename_classes
from vitpar.data.shards.pack import pack
from vitpar.weights.folder import open_weights

NAMES = [f"class{label}" for label in range(CLASSES)]
ORDER = [2, 0, 1, 6, 5, 4, 3]
"""New number of each class in `moved`."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run, and data whose classes are numbered or named in other ways."""
    folder = tmp_path_factory.mktemp("classes") / "place"
    shutil.copytree(shared_run("small", tmp_path_factory), folder)
    for name in ("moved", "other", "mixed"):
        shutil.copytree(folder / "data", folder / name)
    moved = [NAMES[ORDER.index(number)] for number in range(CLASSES)]
    rename_classes(folder / "moved", moved, ORDER)
    rename_classes(folder / "other", [f"type{label}" for label in range(CLASSES)])
    rename_classes(folder / "mixed", [*NAMES[:-1], "zebra"])
    for split in ("train", "val"):
        for label in (5, 2):
            shutil.copytree(folder / f"source/{split}/class{label}", folder / f"some/{split}/class{label}")
    pack(folder / "some", folder / "subset")
    return folder


def evaluated(vitpar: Command, place: Path, data: str) -> tuple[list[dict[str, Any]], dict[str, float], str]:
    """Return the rows of predictions, the figures and the warnings of an evaluation on `data`."""
    words = ("--checkpoint", "run", "--data", data, "--predictions", f"{data}.parquet", "--json")
    done = vitpar("eval", *words)
    assert done.returncode == 0, done.stderr
    return parquet.read_table(place / f"{data}.parquet").to_pylist(), json.loads(done.stdout), done.stderr


def test_eval_matches_classes_by_name(place: Path, vitpar: Command, refused: Refused) -> None:
    rows, figures, said = evaluated(vitpar, place, "data")
    assert said == ""
    labels = [row["label"] for row in rows]
    for data, words in (("moved", "matched by name"), ("other", "'type2', … (7): they are compared by number")):
        found, same, said = evaluated(vitpar, place, data)
        assert same == figures and [row["label"] for row in found] == labels and words in said
    some, figures, said = evaluated(vitpar, place, "subset")
    assert "the 2 classes of 'subset' are matched by name with the 7 of the weights" in said
    expected = [row["label"] for row in rows if row["label"] in (2, 5)]
    assert sorted(row["label"] for row in some) == sorted(expected) and figures["samples"] == len(expected)
    hits = sum(row["label"] == row["predicted"] for row in rows if row["label"] in (2, 5))
    assert figures["top1"] == pytest.approx(hits / len(expected))
    mixed = ("eval", "--checkpoint", "run", "--data", "mixed")
    refused(place, [(mixed, "lack 'zebra' of 'mixed': give the data they were trained on")])


def test_resume_refuses_other_classes(place: Path, vitpar: Command, refused: Refused) -> None:
    for data, words in (
        ("moved", "'moved' has other classes, or the same in another order"),
        ("mixed", "'mixed' has other classes"),
        ("other", "those of 'other' are 'type0', 'type1', 'type2', … (7): change them back, or resume with --allow"),
    ):
        resume = ("train", "--resume", "run", "--data", data, "--steps", "5", "--allow-change", "train.steps")
        anyway = (*resume, "--run-dir", f"again_{data}", "--allow-change", "data")
        refused(place, [(resume, words)] if data == "other" else [(resume, words), (anyway, words)])
    done = vitpar(*anyway)
    assert done.returncode == 0, done.stderr


def test_initial_weights_match_the_classifier_by_name(place: Path, vitpar: Command) -> None:
    began = open_weights(place / "run/weights").read("head.fc.weight")
    for data, words, rows in (
        ("moved", "are matched by name", [ORDER.index(number) for number in range(CLASSES)]),
        ("subset", "the 2 classes of 'subset' are matched by name", [2, 5]),
        ("other", "the classifier of 7 classes is newly initialised (the weights' classes are 'class0'", None),
        ("mixed", "newly initialised (the weights' classes 'class0', 'class1', 'class2', … (7) lack 'zebra'", None),
    ):
        words_of_run = ("train", "--recipe", "recipe.toml", "--weights", "run/weights", "--data", data, "--steps", "1")
        done = vitpar(*words_of_run, "--set", "optimizer.lr=1e-9", "--run-dir", f"tuned_{data}")
        assert done.returncode == 0, done.stderr
        assert words in " ".join(done.stdout.split()), done.stdout
        tuned = open_weights(place / f"tuned_{data}/weights").read("head.fc.weight")
        equal = rows is not None and torch.allclose(tuned, began[rows], atol=1e-7)
        assert equal == (rows is not None)
