"""Data, checkpoints and weights in object storage, with a server that speaks S3 (moto)."""

import errno
import io
import os
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

import vitpar
from helpers.command_line import Refused, run, started
from helpers.killed_runs import alive, ranks_of, wait_for
from helpers.small_data import pack_small
from helpers.trained import recipe_of, rows
from vitpar import copying, parse
from vitpar.checkpoint.index import INDEX
from vitpar.data.shards.index import Labels
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.stream.stream_set import Reader, StreamPart, StreamSet
from vitpar.errors import DataError, RecipeError
from vitpar.object_store import ObjectPath, parse_place
from vitpar.recipe import Recipe

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
FILES = ("a.safetensors", INDEX, "z.json")
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


def train(run_dir: Path, recipe: Recipe, **more: Any) -> list[dict[str, Any]]:
    """Train, check that no secret is in a file of the run, and return its rows."""
    vitpar.train(recipe, device="cpu", run_dir=run_dir, **more)
    for path in (path for path in run_dir.rglob("*") if path.is_file()):
        assert SECRET.encode() not in path.read_bytes() and KEY.encode() not in path.read_bytes()
    return rows(run_dir)


def test_samples_are_those_of_the_disk(folder: Path, bucket: ObjectPath) -> None:
    here, there = (ShardSet.open(name, "train") for name in (folder / "packed", "s3://bucket/data"))
    assert there.fingerprint == here.fingerprint and there.place == "s3://bucket/data"
    assert [there.read(i) for i in range(len(there))] == [here.read(i) for i in range(len(here))]
    assert there.name(3) == here.name(3)
    there.refuse_changed()
    with pytest.raises(
        DataError, match=r"no data set at 's3://bucket/none': make one with .* copy DIR s3://bucket/none"
    ):
        ShardSet.open("s3://bucket/none", "train")


def test_replaced_and_missing_shards_are_refused(folder: Path, bucket: ObjectPath) -> None:
    upload(folder / "packed", bucket / "changed")
    shards = ShardSet.open("s3://bucket/changed", "train")
    shard = bucket / "changed" / shards.files[0].name
    content = shard.read_bytes(1 << 30)
    shard.write(io.BytesIO(content[:-1] + b"x"))
    with pytest.raises(DataError, match="changed during use"):
        shards.refuse_changed()
    with pytest.raises(DataError, match="changed during use"):
        shards.read(0)
    shard.write(io.BytesIO(content[:-512]))
    with pytest.raises(DataError, match=r"bytes but .* were indexed"):
        ShardSet.open("s3://bucket/changed", "train")
    shard.remove()
    with pytest.raises(DataError, match=r"shard .* is missing"):
        ShardSet.open("s3://bucket/changed", "train")


def test_run_has_the_losses_of_the_same_data_on_disk(folder: Path) -> None:
    disk = train(folder / "disk", recipe_of(folder / "packed", "dp1"))
    assert train(folder / "objects", recipe_of("s3://bucket/data", "dp1")) == disk != []


def test_stream_has_the_samples_of_the_same_shards_on_disk(folder: Path) -> None:
    names = [path.name for path in sorted((folder / "packed").glob("train-*.tar"))]
    sets = [[f"{start}/{name}" for name in names] for start in (str(folder / "packed"), "s3://bucket/data")]
    here, there = (
        Reader(
            StreamSet(tuple(urls), 35, 7, Labels()), StreamPart(0, 1), 0, bad_sample="fail", stopping=threading.Event()
        )
        for urls in sets
    )
    assert [(s.image, s.label, s.key) for s in there.once()] == [(s.image, s.label, s.key) for s in here.once()]


@pytest.mark.parametrize(
    "name", ["s3://key:secret@bucket/data", "s3://bucket/../x", "s3://bucket/a//b", "s3://", "s3://bucket/\x1b[2J"]
)
def test_malformed_names_are_refused(name: str) -> None:
    with pytest.raises(DataError, match="is not a name such as s3://BUCKET/FOLDER") as refused:
        parse_place(name)
    assert "secret" not in str(refused.value)


def test_storage_that_fails_is_named_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"cannot read 's3://bucket/data/dataset.json': .* \(it cannot be reached\)"):
        ShardSet.open("s3://bucket/data", "train")
    import obstore

    def head(store: Any, key: str) -> None:
        raise obstore.exceptions.GenericError(f"error at http://storage/{key}?token={SECRET}")

    monkeypatch.setattr(obstore, "head", head)
    with pytest.raises(OSError, match=r"the storage failed \(GenericError\)"):
        ObjectPath.parse("s3://bucket/data").stat()


def test_copies_of_data_are_complete_or_look_absent(
    folder: Path, bucket: ObjectPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = run(folder, ["copy", "packed", "s3://bucket/again"])
    assert said.returncode == 0 and "copied 8 files to s3://bucket/again" in said.stdout
    assert run(folder, ["copy", "s3://bucket/again", str(tmp_path / "back")]).returncode == 0
    assert {p.name: p.read_bytes() for p in (tmp_path / "back").iterdir()} == {
        p.name: p.read_bytes() for p in (folder / "packed").iterdir()
    }
    written: list[str] = []

    def write(path: ObjectPath, file: BinaryIO, real: Callable[..., None] = ObjectPath.write) -> None:
        if len(written) == 2:
            raise OSError(errno.EIO, "the network is gone")
        written.append(path.name)
        real(path, file)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectPath, "write", write)
        patch.setattr(copying, "_AT_ONCE", 1)
        with pytest.raises(DataError, match=r"cannot copy .* the network is gone"):
            copying.upload(folder / "packed", bucket / "again")
    with pytest.raises(DataError, match="no data set at"):
        ShardSet.open("s3://bucket/again", "train")
    with pytest.raises(DataError, match=r"'.*back' exists: name a new folder"):
        copying.download(bucket / "data", tmp_path / "back")


def test_damaged_and_hostile_copies_are_refused(folder: Path, bucket: ObjectPath, tmp_path: Path) -> None:
    upload(folder / "packed", bucket / "damaged")
    name = ShardSet.open("s3://bucket/damaged", "train").files[0].name
    (bucket / "damaged" / name).write(io.BytesIO(b"short"))
    with pytest.raises(DataError, match=f"the copy lacks shard '{name}', or a part of it"):
        copying.download(bucket / "damaged", tmp_path / "copy")
    (bucket / "hostile" / "a\\..\\b").write(io.BytesIO(b""))
    with pytest.raises(DataError, match="which is no name of a file: do not copy it"):
        copying.download(bucket / "hostile", tmp_path / "copy")
    assert not list(tmp_path.iterdir()), "nothing is left"


def test_run_is_copied_and_resumes_from_its_copy(folder: Path, bucket: ObjectPath) -> None:
    """A machine is lost while it copies its last checkpoint; another one has the losses of an unbroken run."""
    copied: dict[str, Any] = {"checkpoint.copy_to": "s3://bucket/runs/mine"}
    recipe = recipe_of(folder / "packed", "dp1", **copied)
    unbroken = train(folder / "first", recipe)
    there = bucket / "runs" / "mine"
    names = set(there.files())
    assert {name.split("/")[1] for name in names if name.startswith("checkpoints/")} == {"step_3", "step_6"}
    assert {"recipe.toml", "log.txt", "metrics.jsonl", "weights/model.safetensors.index.json"} <= names
    with pytest.raises(
        RecipeError, match=r"copy_to 's3://bucket/runs/mine' is not empty: name another folder, or copy"
    ):
        train(folder / "second", recipe)
    last = there / "checkpoints" / "step_6" / "index.json"
    last.remove()
    copying.download(there, folder / "restored")
    assert train(folder / "restored", recipe, resume="auto") == unbroken
    assert f"resuming from {folder}/restored/checkpoints/step_3" in (folder / "restored" / "log.txt").read_text()
    assert last.is_file(), "the resumed run has copied it again"
    train(folder / "restored", recipe_of(folder / "packed", "dp1", **copied, **{"checkpoint.keep": 1}), resume="auto")


@pytest.mark.parametrize("mesh", ["dp2", "fsdp2xtp2"])
def test_ranks_killed_while_they_copy_leave_no_complete_copy(
    mesh: str, folder: Path, bucket: ObjectPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage receives all of a checkpoint but one shard when the ranks are killed; others resume from the copy."""
    from moto.s3.responses import S3Response

    place, there = folder / mesh, bucket / "runs" / mesh
    place.mkdir()
    recipe = recipe_of(folder / "packed", mesh, **{"checkpoint.copy_to": str(there)})
    (place / "recipe.toml").write_text(recipe.to_toml())
    (place / "unbroken.toml").write_text(recipe_of(folder / "packed", mesh).to_toml())
    assert run(place, ["train", "--recipe", "unbroken.toml", "--run-dir", "unbroken"]).returncode == 0
    held, killed = list[str](), threading.Event()

    def put(self: Any, query: Any, name: str, real: Callable[..., Any] = S3Response._key_response_put) -> Any:
        if "step_6/" in name and name.endswith(".safetensors") and held in ([], [name]):
            held[:] = [name]
            killed.wait(300)
            return 500, {}, b""
        return real(self, query, name)

    def copied() -> set[str]:
        return {name.removeprefix("step_6/") for name in (there / "checkpoints").files() if name.startswith("step_6/")}

    with monkeypatch.context() as patch:
        patch.setattr(S3Response, "_key_response_put", put)
        process = started(place, ["train", "--recipe", "recipe.toml", "--run-dir", "mine"])
        saved = place / "mine" / "checkpoints" / "step_6"
        wait_for(lambda: bool(held), process)
        others = {path.name for path in saved.iterdir()} - {INDEX, held[0].rpartition("/")[2]}
        wait_for(lambda: copied() >= others, process)
        ranks = ranks_of(process.pid)
        for pid in [process.pid, *ranks]:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not alive(ranks), process, ended=True)
        killed.set()
    assert len(ranks) == parse(mesh).world_size and copied() == others
    copying.download(there, place / "restored")
    done = run(place, ["train", "--recipe", "recipe.toml", "--run-dir", "restored", "--resume", "auto"])
    assert done.returncode == 0 and "resuming from restored/checkpoints/step_3" in done.stdout, done.stderr
    assert rows(place / "restored") == rows(place / "unbroken") != []
    copying.download(there, place / "again")  # it verifies the checksums of each checkpoint
    assert {path.name for path in (place / "again" / "checkpoints").iterdir()} == {"step_3", "step_6"}
    assert (place / "again" / "checkpoints" / "step_6" / INDEX).is_file()


def test_run_continues_if_a_copy_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: ObjectPath, file: BinaryIO) -> None:
        raise OSError(errno.EIO, "the network is gone")

    monkeypatch.setattr(ObjectPath, "write", write)
    recipe = recipe_of(folder / "packed", "dp1", **{"checkpoint.copy_to": "s3://bucket/runs/failing"})
    assert len(train(folder / "failing", recipe)) == 6
    log = (folder / "failing" / "log.txt").read_text()
    assert "step 3 was saved but not copied to 's3://bucket/runs/failing': the network is gone" in log
    assert "the final weights were not copied to 's3://bucket/runs/failing'" in log


def test_checkpoints_that_are_not_kept_are_removed(
    bucket: ObjectPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their indices are removed first; so is that of a checkpoint that is written again, which gets it back last."""
    checkpoints, did = {step: tmp_path / "checkpoints" / f"step_{step}" for step in (1, 2, 3)}, list[str]()
    for step, checkpoint in checkpoints.items():
        checkpoint.mkdir(parents=True)
        for name in FILES:
            (checkpoint / name).write_text(str(step))
        copying.upload_checkpoint(checkpoint, bucket / "kept", {1, 2})
    for name in ("write", "remove"):

        def noted(path: ObjectPath, *file: Any, name: str = name, real: Any = getattr(ObjectPath, name)) -> None:
            did.append(f"{name} {path.parent.name} {path.name}")
            real(path, *file)

        monkeypatch.setattr(ObjectPath, name, noted)
    copying.upload_checkpoint(checkpoints[3], bucket / "kept", {1})
    removed = [f"remove step_{{}} {name}" for name in (INDEX, "a.safetensors", "z.json")]
    assert sorted(did[:3]) == sorted(line.format(3) for line in removed) and did[0] == f"remove step_3 {INDEX}"
    assert did[5] == f"write step_3 {INDEX}"
    assert sorted(did[6:]) == sorted(line.format(2) for line in removed) and did[6] == f"remove step_2 {INDEX}"
    assert (str(bucket), str(bucket / "a"), str((bucket / "a").parent)) == (
        "s3://bucket",
        "s3://bucket/a",
        "s3://bucket",
    )
    assert set((bucket / "kept").files()) == {f"checkpoints/step_{step}/{name}" for step in (1, 3) for name in FILES}


def test_object_storage_is_refused_where_a_folder_is_needed(tmp_path: Path, refused: Refused) -> None:
    sentence = (
        "'s3://bucket/x' is in object storage, but a folder is needed: copy it with `vitpar copy s3://bucket/x DIR`"
    )
    places = (
        ["train", "--recipe", "digits", "--run-dir", "s3://bucket/x"],
        ["train", "--recipe", "digits", "--run-dir", "x", "--resume", "s3://bucket/x"],
        ["eval", "--checkpoint", "s3://bucket/x"],
        ["data", "info", "s3://bucket/x"],
    )
    refused(tmp_path, [(words, sentence) for words in places])
    refused(tmp_path, [(["copy", "a", "b"], "one of 'a' and 'b' must be s3://BUCKET/FOLDER, and the other a folder")])
