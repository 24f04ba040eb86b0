"""`vitpar features`: a Parquet file of what the classifier reads."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch

from helpers.command_line import Command, Refused
from helpers.foreign_weights import TIMM_CONFIG, WIDTH, saved, timm_state
from helpers.small_data import VAL, damage, pack_small
from vitpar.data.shards.shard_set import ShardSet
from vitpar.training.parquet_file import feature_file
from vitpar.weights.importing import import_weights


@pytest.fixture(scope="module")
def place(place: Path) -> Path:
    """Return a folder with data, one of whose images is damaged, and weights."""
    shutil.copytree(place / "source" / "val" / "class0", place / "images")
    damage(place / "data", "val", 3)
    import_weights(saved(place / "there", timm_state(), TIMM_CONFIG), place / "weights")
    return place


def test_features_of_a_data_set_and_of_files_are_read_back(place: Path, vitpar: Command) -> None:
    words = ("--data", "data", "--checkpoint", "weights", "--out", "f.parquet", "--batch-size", "4")
    done = vitpar("features", *words)
    assert done.returncode == 1, done.stderr
    assert done.stdout == f"f.parquet: {VAL - 1} images, {WIDTH} features each (input of head.fc)\n"
    shards = ShardSet.open(place / "data", "val")
    assert done.stderr.startswith(f"error: sample '{shards.name(3)}' of 'data': its checksum")
    good = [i for i in range(VAL) if i != 3]
    table = parquet.read_table(place / "f.parquet")
    assert str(table.schema.field("embedding").type) == f"fixed_size_list<element: float>[{WIDTH}]"
    assert table["key"].to_pylist() == [shards.name(i) for i in good]
    assert table["label"].to_pylist() == [shards.label(i) for i in good]
    embeddings = dict(zip([shards.read(i) for i in good], table["embedding"].to_pylist(), strict=True))
    about = json.loads(table.schema.metadata[b"vitpar"])
    assert about["input_of"] == ["head.fc"] and about["weights"] == "weights"

    done = vitpar("features", "images", "--checkpoint", "weights", "--out", "i.parquet", "--json")
    assert done.returncode == 0, done.stderr
    paths = sorted(str(path.relative_to(place)) for path in (place / "images").iterdir())
    assert json.loads(done.stdout)["images"] == len(paths)
    table = parquet.read_table(place / "i.parquet")
    assert table["key"].to_pylist() == paths and table["label"].to_pylist() == [None] * len(paths)
    same = [embeddings[(place / path).read_bytes()] for path in paths]
    assert np.allclose(table["embedding"].to_pylist(), same, atol=1e-5)


def test_file_appears_complete_in_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitpar.training.parquet_file.GROUP_BYTES", 80)
    numbers = torch.arange(20.0).view(10, 2)
    with feature_file(tmp_path / "f.parquet", 2, {}) as file:
        for row in range(0, 10, 2):
            file.add([f"{row}", "\udcff"], [row, None], numbers[row : row + 2])
            assert not (tmp_path / "f.parquet").exists()
    read = parquet.ParquetFile(tmp_path / "f.parquet")
    assert [read.metadata.row_group(i).num_rows for i in range(read.num_row_groups)] == [4, 4, 2]
    assert read.read()["embedding"].to_pylist() == numbers.tolist()
    assert read.read()["key"].to_pylist()[1] == "\\udcff"


SMALL = ["--checkpoint", "weights", "--out", "x.parquet"]


MISTAKES = [
    (SMALL, "reads either image files or a data set: name images, or --data DIR"),
    (["images", "--data", "data", *SMALL], "reads either image files or a data set"),
    (["images", *SMALL[:3], "gone/x.parquet"], "cannot write gone/x.parquet"),
    (["--data", "data", "--data-split", "test", *SMALL], "test"),
]


def test_mistakes_are_refused(place: Path, refused: Refused) -> None:
    refused(place, MISTAKES, "features")
    assert not (place / "x.parquet").exists()


def test_a_probe_of_the_features_becomes_the_classifier(place: Path, vitpar: Command, refused: Refused) -> None:
    pack_small(place / "whole")
    for split in ("train", "val"):
        words = f"--data whole/packed --data-split {split} --checkpoint weights --out {split}.parquet".split()
        assert vitpar("features", *words).returncode == 0
    words = ["probe", "train.parquet", "val.parquet", "--rates", "0.01,1,5", "--neighbours", "1,5", "--epochs", "50"]
    done = vitpar(*words, "--out", "probed", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    best = max(found["linear"], key=lambda row: row["top1"])
    assert found["best_rate"] == best["rate"] and len({row["train_top1"] for row in found["linear"]}) > 1
    assert [row["neighbours"] for row in found["neighbours"]] == [1, 5]
    evaluated = vitpar("eval", "--checkpoint", "probed", "--data", "whole/packed", "--json")
    assert json.loads(evaluated.stdout)["top1"] == pytest.approx(best["top1"]), evaluated.stderr
    shown = vitpar(*words)
    assert ("others may be better" in shown.stderr) == (best["rate"] in (0.01, 5))
    assert "linear, rate 5" in shown.stdout and "best" in shown.stdout and "1 neighbour " in shown.stdout
    rows = [
        ((*words[1:], "--out", "probed"), "'probed' exists and is not empty"),
        (["train.parquet", "gone.parquet", "--rates", "a"], "--rates is 'a': give numbers above 0"),
    ]
    refused(place, rows, "probe")
