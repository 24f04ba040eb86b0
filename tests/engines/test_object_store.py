"""Data, checkpoints and weights in object storage, with a server that speaks S3 (moto)."""

import io
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.small_data import pack_small
from helpers.trained import recipe_of, rows
from vitpar.data.shards.shard_set import ShardSet
from vitpar.errors import DataError
from vitpar.object_store import ObjectPath, place

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
KEY, SECRET = "AKIAOFTESTS", "the-secret-of-tests"


@pytest.fixture(scope="module", autouse=True)
def bucket() -> Iterator[ObjectPath]:
    """Start the server, set the variables that name it, and return an empty bucket."""
    why = "make test-engines installs it"
    moto, _ = pytest.importorskip("moto.server", reason=why), pytest.importorskip("obstore", reason=why)
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    address = "http://{}:{}".format(*server.get_host_and_port()).replace("0.0.0.0", "127.0.0.1")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"ACCESS_KEY_ID": KEY, "SECRET_ACCESS_KEY": SECRET, "ENDPOINT_URL": address}.items():
            patch.setenv(f"AWS_{name}", value)
        urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT")).close()
        yield ObjectPath.parse("s3://bucket")
    server.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, bucket: ObjectPath) -> Path:
    """Return a folder with a packed data set, `packed`, of which the bucket has a copy, `data`."""
    folder = tmp_path_factory.mktemp("objects")
    upload(pack_small(folder), bucket / "data")
    return folder


def upload(source: Path, target: ObjectPath) -> None:
    for path in source.iterdir():
        with path.open("rb") as file:
            (target / path.name).write(file)


def vitpar(folder: Path, *words: str) -> str:
    """Run a command in `folder` and return what it prints, in which no secret may be."""
    usual = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "VITPAR_DEBUG": ""}
    command = [sys.executable, "-m", "vitpar_cli.main", *words]
    done = subprocess.run(command, cwd=folder, env=os.environ | usual, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert SECRET not in said and KEY not in said
    assert done.returncode == 0, said
    return said


def test_samples_are_those_of_the_disk(folder: Path, bucket: ObjectPath) -> None:
    here, there = (ShardSet.open(name, "train") for name in (folder / "packed", "s3://bucket/data"))
    assert there.fingerprint == here.fingerprint and there.place == "s3://bucket/data"
    assert [there.read(i) for i in range(len(there))] == [here.read(i) for i in range(len(here))]
    assert there.name(3) == here.name(3)
    there.refuse_changed()
    with pytest.raises(DataError, match=r"no data set at 's3://bucket/none': make one with .* copy DIR s3://bucket/none"):
        ShardSet.open("s3://bucket/none", "train")


def test_replaced_and_missing_shards_are_refused(folder: Path, bucket: ObjectPath) -> None:
    upload(folder / "packed", bucket / "changed")
    shards = ShardSet.open("s3://bucket/changed", "train")
    shard = bucket / "changed" / shards.files[0].name
    content = shard.read_bytes(1 << 30)
    shard.write(io.BytesIO(content[:-1] + b"x"))
    with pytest.raises(DataError, match="replaced during use"):
        shards.refuse_changed()
    with pytest.raises(DataError, match="replaced during use"):
        shards.read(0)
    shard.write(io.BytesIO(content[:-512]))
    with pytest.raises(DataError, match="bytes but .* were indexed"):
        ShardSet.open("s3://bucket/changed", "train")
    shard.remove()
    with pytest.raises(DataError, match="shard .* is missing"):
        ShardSet.open("s3://bucket/changed", "train")


def test_run_has_the_losses_of_the_same_data_on_disk(folder: Path) -> None:
    (folder / "recipe.toml").write_text(recipe_of(folder / "packed", "dp2").to_toml())
    base = ("train", "--recipe", "recipe.toml", "--device", "cpu")
    vitpar(folder, *base, "--run-dir", "disk")
    vitpar(folder, *base, "--run-dir", "objects", "--data", "s3://bucket/data")
    assert rows(folder / "objects") == rows(folder / "disk") != []
    for path in (path for path in (folder / "objects").rglob("*") if path.is_file()):
        assert SECRET.encode() not in path.read_bytes() and KEY.encode() not in path.read_bytes()


def test_stream_has_the_samples_of_the_same_shards_on_disk(folder: Path) -> None:
    import threading

    from vitpar.data.shards.index import Labels
    from vitpar.data.stream.stream_set import Reader, StreamPart, StreamSet

    names = [path.name for path in sorted((folder / "packed").glob("train-*.tar"))]
    sets = [[f"{start}/{name}" for name in names] for start in (str(folder / "packed"), "s3://bucket/data")]
    here, there = (
        Reader(
            StreamSet(tuple(urls), 35, 7, Labels()),
            StreamPart(0, 1),
            0,
            bad_sample="fail",
            stopping=threading.Event(),
        )
        for urls in sets
    )
    assert [(s.image, s.label, s.key) for s in there.once()] == [(s.image, s.label, s.key) for s in here.once()]


@pytest.mark.parametrize(
    "name", ["s3://key:secret@bucket/data", "s3://bucket/../x", "s3://bucket/a//b", "s3://", "s3://bucket/\x1b[2J"]
)
def test_malformed_names_are_refused(name: str) -> None:
    with pytest.raises(DataError, match="is not a name such as s3://BUCKET/FOLDER") as refused:
        place(name)
    assert "secret" not in str(refused.value)


def test_storage_that_fails_is_named_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"cannot read 's3://bucket/data/dataset.json': .* \(it cannot be reached\)"):
        ShardSet.open("s3://bucket/data", "train")
