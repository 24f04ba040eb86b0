"""`vitpar eval`: several data sets, a file of predictions, and the calibration error."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest

from helpers.calibration import expected_calibration_error
from helpers.command_line import Command, Refused
from helpers.foreign_weights import TIMM_CONFIG, saved, timm_state
from helpers.small_data import VAL, damage
from helpers.tiny_images import write_tree
from vitpar.data.shards.pack import pack
from vitpar.data.shards.shard_set import ShardSet
from vitpar.weights.importing import import_weights

KEYS = ["samples", "loss", "top1", "top5", "ece"]


@pytest.fixture(scope="module")
def place(place: Path) -> Path:
    """Return a folder with two data sets of the same content, one of them with a bad image, and weights."""
    shutil.copytree(place / "data", place / "spoilt")
    damage(place / "spoilt", "val", 3)
    import_weights(saved(place / "there", timm_state(), TIMM_CONFIG), place / "weights")
    return place


def measures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the figures that rows of a file of predictions have, by numpy."""
    label, confidence = (np.array([row[name] for row in rows]) for name in ("label", "probability"))
    best = np.array([row["top5_classes"] for row in rows])
    hits = best == label[:, None]
    return {
        "samples": len(rows),
        "top1": hits[:, 0].mean(),
        "top5": hits.any(axis=1).mean(),
        "ece": expected_calibration_error(confidence, hits[:, 0]),
    }


@pytest.mark.parametrize("mesh", ["dp1", pytest.param("dp3", marks=pytest.mark.slow)])
def test_predictions_of_several_data_sets(mesh: str, place: Path, vitpar: Command) -> None:
    """Neither three ranks nor batches of 12 divide the 17 images."""
    words = ("--checkpoint", "weights", "--data", "data", "--data", "spoilt", "--set", "data.bad_sample=skip")
    size = ("--batch-size", "12" if mesh != "dp1" else "5")
    file = f"{mesh}.parquet"
    done = vitpar("eval", *words, "--mesh", mesh, *size, "--predictions", file, "--json")
    assert done.returncode == 0, done.stderr
    shards = ShardSet.open(place / "data", "val")
    assert done.stderr.startswith(f"warning: 'spoilt': 1 image skipped: sample '{shards.name(3)}'")
    found = json.loads(done.stdout)["data_sets"]
    rows = parquet.read_table(place / file).to_pylist()
    assert [one["data"] for one in found] == ["data", "spoilt"]
    for one, numbers in zip(found, (list(range(VAL)), [i for i in range(VAL) if i != 3]), strict=True):
        assert list(one) == ["data", *KEYS]
        mine = [row for row in rows if row["data"] == one["data"]]
        assert [row["index"] for row in mine] == numbers
        assert [row["key"] for row in mine] == [shards.name(i) for i in numbers]
        assert [row["label"] for row in mine] == [shards.label(i) for i in numbers]
        assert measures(mine) == pytest.approx({key: one[key] for key in measures(mine)})
        assert all(row["predicted"] == row["top5_classes"][0] for row in mine)
        assert all(row["probability"] == max(row["top5_probabilities"]) for row in mine)
    assert [row["data"] for row in rows] == ["data"] * VAL + ["spoilt"] * (VAL - 1)
    about = json.loads(parquet.read_schema(place / file).metadata[b"vitpar"])
    assert about["weights"] == "weights" and about["split"] == "val"
    assert not [path for path in place.iterdir() if path.name.startswith(".")]


def test_one_data_set_is_a_line_and_several_are_a_table(place: Path, vitpar: Command) -> None:
    one = vitpar("eval", "--checkpoint", "weights", "--data", "data")
    assert one.returncode == 0 and one.stderr == "", one.stderr
    words = re.fullmatch(rf"{VAL} images of 'val': top-1 (\S+), top-5 (\S+), ECE (\S+), loss (\S+)\n", one.stdout)
    assert words, one.stdout
    shutil.copytree(place / "data", place / "copy [red]")
    both = vitpar("eval", "--checkpoint", "weights", "--data", "data", "--data", "copy [red]")
    assert both.returncode == 0, both.stderr
    rows = [line.split() for line in both.stdout.splitlines()]
    assert rows[-2:] == [["data", str(VAL), *words.groups()], ["copy", "[red]", str(VAL), *words.groups()]]


SMALL = ["eval", "--checkpoint", "weights"]
STREAM = ("val=x.tar", "train=x.tar", "samples=9", "val_samples=9", "classes=7")


MISTAKES = [
    ([*SMALL, "--data", "data", "--data", "gone"], "no data set at 'gone'"),
    ([*SMALL, "--data", "data", "--data", "./spoilt/../data/../data"], "--data names a data set twice"),
    ([*SMALL, "--data", "data", "--predictions", "gone/p.parquet"], "cannot write gone/p.parquet"),
    ([*SMALL, "--data", "data", "--data", "digits"], "'digits' has 3 classes but the weights in 'weights' have 7"),
    ([*SMALL, "--predictions", "p.parquet", *(f"--set=stream.{key}" for key in STREAM)], "--predictions needs packed"),
]


def test_mistakes_are_refused(place: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tree(place / "tree")
    pack(place / "tree", place / "digits")
    refused(place, MISTAKES)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    words = [*SMALL, "--data", "data", "--mesh", "dp2", "--predictions", "p.parquet", "--batch-size", "4"]
    refused(place, [(words, "pip install -e '.[parquet]'")])
    assert not (place / "p.parquet").exists()
