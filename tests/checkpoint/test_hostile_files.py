"""Untrusted weights and checkpoints: they run no code, nothing outside their folder is read, a line refuses each."""

import json
import os
import pickle
import shutil
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from helpers.foreign_models import timm_logits
from helpers.foreign_weights import HEADS, TIMM_CONFIG, WIDTH, as_transformers, saved, timm_state, transformers_config
from helpers.imported import IMAGES, logits_of
from helpers.ranks import Ranks
from helpers.small_data import pack_small
from helpers.trained import changed, recipe_of, train
from vitpar.checkpoint.index import INDEX, Index, StoredFile, read_index
from vitpar.errors import CheckpointError, DataError, UserError
from vitpar.limits import MAX_QUOTED_CHARS
from vitpar.recipe import read_recipe
from vitpar.weights.folder import open_weights
from vitpar.weights.importing import import_weights


def refused(path: Path, message: str, **options: Any) -> None:
    with pytest.raises(UserError, match=message) as caught:
        import_weights(path, path.parent / "here", **options)
    said = str(caught.value)
    assert "\n" not in said and "\x1b" not in said and len(said) < 600
    assert not (path.parent / "here").exists() and not (path.parent / "here.partial").exists()


# pickles


class Touch:
    """Object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


def pickled(kind: str, tmp_path: Path, mark: Path) -> Path:
    content = {"model": timm_state(qk_norm=True), "extra": Touch(mark)}
    path = tmp_path / "theirs.pth"
    if kind == "plain pickle":
        path.write_bytes(pickle.dumps(content))
    elif kind == "in a folder":
        path = tmp_path / "there"
        path.mkdir()
        torch.save(content, path / "pytorch_model.bin")
    else:
        torch.save(content, path, _use_new_zipfile_serialization=kind == "zip")
    return path


KINDS = ("zip", "before torch 1.6", "in a folder", "plain pickle")


def test_pickle_with_code_is_refused_without_running_it(tmp_path: Path) -> None:
    for kind in KINDS:
        (folder := tmp_path / kind).mkdir()
        refused(pickled(kind, folder, folder / "mark"), "contains more than tensors .*--trust")
        assert not (folder / "mark").exists()


def test_trusted_pickle_is_read(tmp_path: Path) -> None:
    expected = timm_logits(timm_state(qk_norm=True), IMAGES)
    for kind in KINDS[:3]:
        folder = tmp_path / kind
        folder.mkdir()
        import_weights(pickled(kind, folder, folder / "mark"), folder / "here", trust=True)
        assert (folder / "mark").exists()
        torch.testing.assert_close(logits_of(folder / "here"), expected, atol=1e-5, rtol=1e-5)


def claiming(tensor: torch.Tensor) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        torch.save({**timm_state(qk_norm=True), "norm.bias": tensor}, folder / "x.pth")
        return folder / "x.pth"

    return write


def cut(folder: Path) -> Path:
    os.truncate(path := claiming(torch.ones(WIDTH))(folder), 5_000)
    return path


def raw(content: bytes, name: str = "x.pth") -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def safetensors(header: Any, data: bytes = b"", length: int | None = None) -> Callable[[Path], Path]:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return raw(struct.pack("<Q", len(text) if length is None else length) + text + data, "x.safetensors")


def tensor(begin: int, end: int, *shape: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (claiming(torch.ones(3).to_sparse()), "cannot be a parameter"),
        (claiming(torch.ones(3, dtype=torch.bool)), "torch.bool .*cannot be a parameter"),
        (cut, "cannot be read"),
        (raw(b"PK\x03\x04" + b"\0" * 100), "cannot be read"),
        (raw(pickle.dumps([1, 2])), "cannot be read|has no named tensors|more than tensors"),
        (lambda folder: os.mkfifo(folder / "x.pth") or folder / "x.pth", "no weights at"),
        (lambda folder: folder / "gone", "no weights at"),
        (safetensors({"a": tensor(0, 400, 10, 10)}), "cannot be read"),
        (safetensors({"a": tensor(0, 8, 2), "b": tensor(4, 12, 2)}, bytes(12)), "cannot be read"),
        (safetensors({"a": tensor(0, 8, 1, dtype="I64")}, bytes(8)), "cannot be a parameter: it has dtype I64"),
        (safetensors({"a" * 10**6: tensor(0, 0, 0)}), "the tensor names in .* it has a{198}…$"),
    ],
)
def test_files_with_false_claims_are_refused(write: Callable[[Path], Path], message: str, tmp_path: Path) -> None:
    refused(write(tmp_path), message)


# folders


def mapped(file: Any) -> str:
    return json.dumps({"weight_map": {"pos_embed": file}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((mapped(name), "is not a file in its folder") for name in ("../secret.safetensors", "..", "", "a\0b", ["x"])),
        (mapped("sub/x.safetensors"), "is not a file in its folder"),
        (mapped(3), "lists 3, which is not a file"),
        (mapped("gone.safetensors"), "No such file"),
        (json.dumps({"weight_map": {"other": "model.safetensors"}}), "lacks other, which its index lists"),
        ("{}", "has no weight_map"),
        ("[" * 100_000, "cannot be read"),
        ('{"weight_map": ' + "9" * 5_000 + "}", "cannot be read"),
    ],
)
def test_index_with_forbidden_file_names_is_refused(text: str | bytes, message: str, tmp_path: Path) -> None:
    save_file({"pos_embed": torch.ones(1)}, tmp_path / "secret.safetensors")
    folder = saved(tmp_path / "there", timm_state(), TIMM_CONFIG)
    (folder / "model.safetensors.index.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(folder, message)


def test_index_of_pickles_decides_which_tensors_are_used(tmp_path: Path) -> None:
    folder, state = saved(tmp_path / "there", {}, TIMM_CONFIG), timm_state()
    (folder / "model.safetensors").unlink()
    torch.save({"norm.bias": torch.full((WIDTH,), 7.0), "norm.weight": state["norm.weight"]}, folder / "1.bin")
    torch.save(state, folder / "2.bin")
    places = {**dict.fromkeys(state, "2.bin"), "norm.bias": "1.bin"}
    (index := folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    import_weights(folder, tmp_path / "first")
    assert (open_weights(tmp_path / "first").read("head.norm.bias") == 7).all()
    index.write_text(json.dumps({"weight_map": {**places, "norm.gone": "1.bin"}}))
    refused(folder, r"1.bin' lacks norm.gone, which its index lists")


def test_symlinks_to_regular_files_are_followed(tmp_path: Path) -> None:
    folder = saved(tmp_path / "there", timm_state(), TIMM_CONFIG)
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (folder / "model.safetensors").rename(blobs / "1")
    (folder / "model.safetensors").symlink_to(blobs / "1")
    import_weights(folder, tmp_path / "here")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("/dev/zero")
    refused_place = tmp_path / "other"
    with pytest.raises(DataError, match="it is not a regular file"):
        import_weights(folder, refused_place)


def test_invalid_values_in_a_foreign_config(tmp_path: Path) -> None:
    folder = saved(tmp_path / "there", as_transformers(timm_state()), transformers_config())
    images = {"image_mean": [10**400] * 3, "image_std": [float("nan"), 1, 1], "resample": [2]}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    import_weights(folder, tmp_path / "here")
    recipe = read_recipe(tmp_path / "here" / "recipe.toml", {"data.path": "x"})
    assert (recipe.data.mean, recipe.data.std) == ((0.5,) * 3,) * 2
    shutil.rmtree(tmp_path / "here")
    values: list[tuple[dict[str, Any], str]] = [
        ({"model_type": "x" * 10**6}, "has model_type 'x+…, but only vit, .*siglip.* can be imported"),
        ({"layer_norm_eps": "x" * 10**6}, "has layer_norm_eps 'x+…, which is not a number"),
        ({"layer_norm_eps": float("nan")}, "has layer_norm_eps nan, which is not a number"),
        ({"layer_norm_eps": 0.0}, "norm_eps of vit_custom is 0.0: it must be above 0 and at most 1"),
    ]
    for given, message in values:
        (folder / "config.json").write_text(json.dumps(transformers_config(**given)))
        refused(folder, message)
    for content in (b"[" * 100_000, b"\xff\xfe", b"[1]", b'{"a": '):
        for file in ("config.json", "preprocessor_config.json"):
            (folder / "config.json").write_text(json.dumps(transformers_config()))
            (folder / file).write_bytes(content)
            refused(folder, f"{file}' cannot be read")


# vitpar's own


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    import_weights(saved(tmp_path / "there", timm_state(), TIMM_CONFIG), tmp_path / "weights")
    return tmp_path / "weights"


def test_unreadable_own_weights_are_refused(weights: Path) -> None:
    for file in ("config.json", "model.safetensors.index.json"):
        before = (weights / file).read_text()
        for content in (b"[" * 100_000, b"\xff\xfe", b"", b"{"):
            (weights / file).write_bytes(content)
            with pytest.raises(DataError, match=f"{file}.* cannot be read"):
                open_weights(weights)
        (weights / file).write_text(before)
    (weights / file).write_text(before.replace("model-00001", "../there/model-00001"))
    with pytest.raises(DataError, match="is not a file in its folder"):
        open_weights(weights)


# indexes of checkpoints

ONE = {"dtype": "float32", "shape": [2], "parts": [[0, [0], [2]]]}
FILE = {"bytes": 1_000, "crc32": 1}


def indexed(folder: Path, **said: Any) -> Path:
    whole = {"shards": ["a"], "files": {"a": FILE}, "tensors": {"x": ONE}} | said
    with suppress(ValueError):  # give a readable index a valid checksum, so that it is not refused for that
        whole = {"crc32": Index.model_validate(whole).checksum} | whole
    (folder / INDEX).write_text(json.dumps(whole))
    return folder


def index_refused(folder: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read_index(folder)
    said = str(caught.value)
    assert len(said) < 2 * MAX_QUOTED_CHARS + 300 and "\n" not in said


def test_index_that_is_not_a_regular_file_is_refused(tmp_path: Path) -> None:
    index_refused(tmp_path, "is not a checkpoint")
    for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
        make(tmp_path / INDEX)
        index_refused(tmp_path, "cannot be read: it is not a regular file")
        (tmp_path / INDEX).unlink()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Callable[[Path], Path]:
    """Return a function that copies a checkpoint of step 1 to a new folder."""
    place = tmp_path_factory.mktemp("trained")
    recipe = recipe_of(pack_small(place), "dp1", **{"train.steps": 1, "checkpoint.every": 1})
    ranks(1).run(train, recipe, place / "run")
    return lambda folder: Path(shutil.copytree(place / "run" / "checkpoints" / "step_1", folder / "step_1"))


def test_index_that_does_not_parse_is_refused(tmp_path: Path) -> None:
    for said, message in (
        ({"tensors": {"x": ONE | {"parts": [[-1, [0], [2]]]}}}, "tensors.x.parts.0.0: Input should be greater"),
        ({"tensors": {"x": ONE | {"dtype": "x" * 10**6}}}, "tensors.x.dtype: Input should be"),
        ({"tensors": {"y" * 10**6: ONE | {"shape": [3]}}}, "has parts that do not fill y{198}…"),
        ({"tensors": {"x": ONE | {"parts": [[5, [0], [2]]]}}}, "has parts that do not fill x"),
        ({"shards": ["../y"]}, "lists '../y', which is not one of its files"),
        ({"crc32": 1}, "has a wrong checksum"),
    ):
        index_refused(indexed(tmp_path, **said), message)
    for content in (b"[" * 10**6, b"\xff", b'{"shards": '):
        (tmp_path / INDEX).write_bytes(content)
        index_refused(tmp_path, "index.json of .* cannot be read: .*: use another checkpoint")


def test_config_of_a_checkpoint_is_compared_with_its_index(checkpoint: Callable[[Path], Path], tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    config = json.loads((path / "config.json").read_text())
    assert open_weights(path).config.embed_dim == config["embed_dim"]
    text = json.dumps(config | {"embed_dim": 10**5, "num_heads": HEADS})
    (path / "config.json").write_text(text)

    def known(index: Index) -> None:
        index.files["config.json"] = StoredFile(bytes=len(text), crc32=zlib.crc32(text.encode()))

    changed(path, known)
    with pytest.raises(DataError, match=r"has shape \[.*\] but the model has \[.*100000"):
        open_weights(path)
