"""Weights of the Hugging Face hub, from a server on loopback: what is downloaded, imported and refused."""

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from helpers.command_line import refusal, run
from helpers.foreign_weights import CLASSES, TIMM_CONFIG, timm_state
from helpers.hub_server import COMMIT, Hub, serving, use
from helpers.small_data import pack_small
from vitpar.checkpoint.index import read_class_names
from vitpar.errors import DataError
from vitpar.weights.folder import open_weights
from vitpar.weights.hub import HubName, fetch, hub_name, imported

NAMES = [f"kind {number}" for number in range(CLASSES)]
CONFIG = json.dumps(TIMM_CONFIG | {"label_names": NAMES}).encode()
PICKLE = b"\x80\x04}."
TENSORS = {name: tensor.contiguous() for name, tensor in timm_state().items()}
WHOLE = {"config.json": CONFIG, "model.safetensors": save(TENSORS), "pytorch_model.bin": PICKLE, "README.md": b"read"}


def split_files() -> dict[str, bytes]:
    """Return a repository whose weights are in two files with an index."""
    names = sorted(TENSORS)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    weight_map = {name: file for file, inside in halves.items() for name in inside}
    files = {file: save({name: TENSORS[name] for name in inside}) for file, inside in halves.items()}
    index = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    return {"config.json": CONFIG, "model.safetensors.index.json": index, "model.fp16.safetensors": b"", **files}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(Hub({"owner/tiny": WHOLE, "owner/split": split_files()})) as found:
        use(monkeypatch, found.url, str(tmp_path / "cache"))
        yield found


def named(text: str) -> HubName:
    name = hub_name(text)
    assert name is not None
    return name


def test_names_are_told_from_paths() -> None:
    assert hub_name("runs/mine") is None and hub_name("hub/x") is None
    assert hub_name("hf:owner/tiny@v1.0") == HubName("owner/tiny", "v1.0")
    assert str(named("hf:owner/tiny@refs/pr/3")) == "hf:owner/tiny@refs/pr/3"
    for wrong in (
        "hf:",
        "hf:tiny",
        "hf:a/b/c",
        "hf:../b",
        "hf:a/b@",
        "hf:a b/c",
        "hf:a/b\n",
        "hf:a/b@../x",
        "hf:a/b@/x",
    ):
        with pytest.raises(DataError, match="is not a name on the Hugging Face hub: write hf:OWNER/NAME"):
            hub_name(wrong)


@pytest.mark.parametrize("repo", ["owner/tiny", "owner/split"])
def test_weights_are_imported_once(repo: str, hub: Hub, tmp_path: Path) -> None:
    name = named(f"hf:{repo}")
    folder, notes = imported(name, tmp_path / "hub")
    assert folder == tmp_path / "hub" / f"{repo.replace('/', '--')}@{COMMIT[:12]}"
    assert notes[0] == f"{name} was imported into {folder}"
    weights = open_weights(folder)
    torch.testing.assert_close(weights.read("head.fc.weight"), TENSORS["head.weight"], atol=0, rtol=0)
    assert read_class_names(folder, CLASSES) == tuple(NAMES)
    downloaded = {path.rpartition("/")[2] for path in hub.requests if path.startswith("GET") and "/resolve/" in path}
    unwanted = {"pytorch_model.bin", "README.md", "model.fp16.safetensors"}
    assert downloaded == set(hub.repos[repo]) - unwanted
    hub.requests.clear()
    assert imported(name, tmp_path / "hub") == (folder, [])
    assert not any("/resolve/" in path and path.startswith("GET") for path in hub.requests)


def test_weights_are_found_offline(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    name = named("hf:owner/split")
    folder = fetch(name)
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch(name) == folder and not hub.requests
    with pytest.raises(DataError, match=r"hf:owner/tiny was not downloaded before and .*offline mode is enabled"):
        fetch(named("hf:owner/tiny"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    use(monkeypatch, "http://127.0.0.1:9", str(tmp_path / "cache"))  # nothing listens there
    assert fetch(name) == folder
    with pytest.raises(DataError, match="hf:owner/tiny was not downloaded before and the hub cannot be reached"):
        fetch(named("hf:owner/tiny"))


REFUSALS = [
    ((404, "RepoNotFound"), "there is no hf:owner/tiny on the hub, or you may not read it"),
    ((403, "GatedRepo"), "hf:owner/tiny is gated: accept its conditions on its page, and log in"),
    ((404, "RevisionNotFound"), "hf:owner/tiny has no revision 'main'"),
    ((500, "Broken"), "hf:owner/tiny was not downloaded before and the hub cannot be reached"),
]
UNUSUAL = [
    ({"pytorch_model.bin": PICKLE}, r"has neither .* \(it has pytorch_model.bin\): use another revision"),
    ({"config.json": CONFIG}, r"\(it has no weights\)"),
    ({"model.safetensors.index.json": b'{"weight_map": {"a": "../b"}}'}, "is not a file in its folder"),
    ({"model.safetensors.index.json": b'{"weight_map": {"a": "b.bin"}}', "b.bin": b""}, "lacks b.bin, which its"),
    ({"model.safetensors.index.json": b'{"weight_map": {"a": "c*"}}', "c*": b""}, r"lacks c\*, which its index"),
]


def test_refusals_of_the_hub_and_unusual_repositories_are_one_sentence(hub: Hub) -> None:
    for refused, message in REFUSALS:
        hub.refused["owner/tiny"] = refused
        text = "hf:owner/tiny@main" if refused[1] == "RevisionNotFound" else "hf:owner/tiny"
        with pytest.raises(DataError, match=message) as found:
            fetch(named(text))
        assert "\n" not in str(found.value)
    for number, (files, message) in enumerate(UNUSUAL):
        hub.repos[f"owner/odd{number}"] = files
        with pytest.raises(DataError, match=message):
            fetch(named(f"hf:owner/odd{number}"))
    large = {"pytorch_model.bin", "b.bin", "c*"}
    assert not any(path.rpartition("/")[2] in large for path in hub.requests if path.startswith("GET"))


OUT = "../../../../out"
"""Place outside the cache, from the folder of a repository's blobs, snapshots or lists."""


@pytest.mark.parametrize(
    ("headers", "moved", "entry", "commit"),
    [
        ({"ETag": f'"{OUT}"'}, None, {}, COMMIT),
        ({"X-Linked-ETag": f'"{OUT}"', "X-Linked-Size": "1"}, "/moved", {}, COMMIT),
        ({"X-Repo-Commit": OUT}, "{url}/moved", {}, COMMIT),
        ({"Content-Disposition": f'attachment; filename="{OUT}"'}, None, {}, COMMIT),
        ({}, "file://{place}", {}, COMMIT),
        ({}, None, {"oid": OUT, "lfs": {"oid": OUT, "sha256": OUT, "size": 1, "pointerSize": 1}}, COMMIT),
        ({}, None, {}, OUT),
        ({}, None, {}, "/{place}/out"),
        ({}, None, {}, None),
    ],
)
def test_servers_do_not_choose_paths(
    headers: dict[str, str],
    moved: str | None,
    entry: dict[str, object],
    commit: str | None,
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = tmp_path / "1" / "2" / "3" / "cache"
    use(monkeypatch, hub.url, str(cache))
    words = {"place": str(tmp_path), "url": hub.url}
    hub.repos["owner/tiny"] = WHOLE | {OUT: b"", f"/{tmp_path}/out.safetensors": b"", "model.safetensors": b"new"}
    hub.headers = {name: value.format(**words) for name, value in headers.items()}
    hub.moved, hub.entry, hub.commit = moved and moved.format(**words), entry, commit and commit.format(**words)
    with suppress(DataError):
        folder = fetch(named("hf:owner/tiny"))
        assert folder == cache / "models--owner--tiny" / "snapshots" / COMMIT
        assert (folder / "model.safetensors").read_bytes() == b"new"
    written = {path for path in tmp_path.rglob("*") if not path.is_dir()}
    assert all(cache in path.parents for path in written), written


def test_downloads_have_the_listed_size(hub: Hub) -> None:
    hub.claimed = {"model.safetensors": 9}
    with pytest.raises(DataError, match="cannot be downloaded: the hub sends more than 9 bytes"):
        fetch(named("hf:owner/tiny"))


def test_options_of_the_import_are_named(hub: Hub, tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in TENSORS.items() if not name.startswith("head.")}
    hub.repos["owner/odd"] = {"config.json": CONFIG, "model.safetensors": save(tensors)}
    with pytest.raises(
        DataError, match=r"--classes N \(options of `vitpar checkpoint import hf:owner/odd --out DIR`\)"
    ):
        imported(named("hf:owner/odd"), tmp_path / "hub")


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DataError, match=r"hf:owner/tiny needs huggingface_hub: pip install -e '\.\[hub\]'"):
        fetch(named("hf:owner/tiny"))


def printed(place: Path, hub: Hub, *words: str, **more: str) -> str:
    """Return the output of `vitpar <words>` in the folder `place`."""
    environment = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(place / "other"), "NO_PROXY": "127.0.0.1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (environment | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"} | more).items():
            patch.setenv(name, value)
        done = run(place, words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_follows_the_librarys_environment(hub: Hub, tmp_path: Path) -> None:
    printed(tmp_path, hub, "checkpoint", "import", "hf:owner/tiny@main", "--out", "weights", "--image-size", "16")
    assert open_weights(tmp_path / "weights").config.image_size == 16
    assert [path.name for path in (tmp_path / "other").glob("models--*")] == ["models--owner--tiny"]


@pytest.mark.slow
def test_training_and_evaluation_take_names(hub: Hub, tmp_path: Path) -> None:
    """Only the process that starts the ranks downloads, and a resumed run does not ask the hub."""
    pack_small(tmp_path).rename(tmp_path / "data")
    plan = ("--mesh", "dp2", "--batch-size", "4", "--steps", "1", "--run-dir", "run", "--resume", "auto")
    train = ("train", "--weights", "hf:owner/tiny", "--data", "data", *plan, "--set", "data.workers=0")
    folder = f"runs/hub/owner--tiny@{COMMIT[:12]}"
    assert f"parameters are loaded from {folder}" in printed(tmp_path, hub, *train)
    assert sum(path.startswith("GET /api") and "tree" not in path for path in hub.requests) <= 3
    assert f'weights = "{folder}"' in (tmp_path / "run" / "recipe.toml").read_text()
    hub.repos.clear()
    assert "the run is complete" in printed(tmp_path, hub, *train)
    words = ("eval", "--checkpoint", "hf:owner/tiny", "--data", "data", "--json")
    assert json.loads(printed(tmp_path, hub, *words, HF_HUB_OFFLINE="1"))["samples"] == 17


def test_ranks_of_another_launcher_do_not_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (world | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    message = refusal(["eval", "--checkpoint", "hf:owner/tiny"], monkeypatch, capsys)
    assert "hf:owner/tiny would be downloaded by 2 ranks: run `vitpar checkpoint import hf:owner/tiny --out" in message
