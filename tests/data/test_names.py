"""Names of classes: read from every source, refused if they are not distinct, and matched with a model's."""

import json
import os
import pickle
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.archives import cifar_files
from helpers.hostile_files import write_tar
from helpers.tiny_images import encoded
from vitpar.data.classes import class_names, match_classes
from vitpar.data.shards.index import Labels, index
from vitpar.data.shards.pack import pack
from vitpar.data.sources import open_source
from vitpar.errors import DataError
from vitpar.weights.images import read_image_hints
from vitpar.weights.shards import read_object

Encode = Callable[[str], bytes]
Source = Callable[[Path, Sequence[str], Encode], Sequence[str]]
"""Writer of data of three classes into a folder, which returns the names that are read back."""

BEAR, OTHER, DOG = "Bär", "Bör", "Hund"
NFC, NFD = "\u00e9lan", "e\u0301lan"
NOT_UTF8, REPEATED = "is not UTF-8", "two classes are called"
NO_NAME, CONTROL = "has no name", "has a control character"
CASES: dict[str, tuple[Sequence[str], str, str | None]] = {
    "utf-8": ((BEAR, OTHER, DOG), "utf-8", None),
    "mark": ((BEAR, OTHER, DOG), "utf-8-sig", None),
    "cp1252": ((BEAR, OTHER, DOG), "cp1252", NOT_UTF8),
    "latin-1": ((BEAR, OTHER, DOG), "latin-1", NOT_UTF8),
    "utf-16": ((BEAR, OTHER, DOG), "utf-16", NOT_UTF8),
    "nfd": ((NFC, NFD, DOG), "utf-8", r"(?=.*\\xe9lan)(?=.*e\\u0301lan).* look the same"),
    "blank": ((BEAR, " ", DOG), "utf-8", NO_NAME),
    "repeated": ((BEAR, BEAR, DOG), "utf-8", REPEATED),
    "control": ((BEAR, "B\x07r", DOG), "utf-8", CONTROL),
}
"""Names, their encoding, and what the refusal says; None if they are kept."""


def folders(folder: Path, names: Sequence[str], encode: Encode) -> Sequence[str]:
    for name in names:
        os.makedirs(place := os.path.join(os.fsencode(folder), b"train", encode(name)), exist_ok=True)
        for i in range(3):
            Path(os.fsdecode(os.path.join(place, b"%d.png" % i))).write_bytes(encoded(i))
    try:
        return open_source(folder).classes
    except DataError:
        with pytest.raises(DataError):
            pack(folder, folder.parent / "packed")
        assert [*folder.parent.iterdir()] == [folder], "names are checked before anything is written"
        raise


def csv_list(folder: Path, names: Sequence[str], encode: Encode) -> Sequence[str]:
    rows = "".join(f"{i}{k}.png,{name}\n" for i in range(3) for k, name in enumerate(names))
    (folder / "list.csv").write_bytes(encode(f"path,label\n{rows}"))
    return open_source(folder / "list.csv").classes


def tar_members(extension: str, labels: Labels, write: Callable[[str], str], folder: Path, names, encode):  # type: ignore[no-untyped-def]
    members = [(f"{i}.png", encoded(i)) for i in range(len(names))]
    members += [(f"{i}.{extension}", encode(write(name))) for i, name in enumerate(names)]
    write_tar(folder / "train.tar", *members)
    return index(folder, labels=labels).classes


def cls_members(folder: Path, names: Sequence[str], encode: Encode) -> Sequence[str]:
    return tar_members("cls", Labels(), str, folder, names, encode)


def json_members(folder: Path, names: Sequence[str], encode: Encode) -> Sequence[str]:
    write = lambda name: json.dumps({"label": name}, ensure_ascii=False)  # noqa: E731
    return tar_members("json", Labels("json"), write, folder, names, encode)


def tar_folders(folder: Path, names: Sequence[str], encode: Encode) -> Sequence[str]:
    members = [(f"{os.fsdecode(encode(name))}/{i}.png", encoded(i)) for i, name in enumerate(names)]
    write_tar(folder / "train.tar", *members)
    return index(folder, labels=Labels("folder")).classes


def classes_option(folder: Path, names: Sequence[str], encode: Encode) -> Sequence[str]:
    write_tar(folder / "train.tar", ("0.png", encoded(0)), ("0.cls", b"2"))
    return index(folder, classes=class_names(encode("\n".join([*names, "", ""])))).classes


def parquet(folder: Path, names: Sequence[str], encode: Encode) -> Sequence[str]:
    arrow, library = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    about = json.dumps({"info": {"features": {"label": {"names": names}}}}, ensure_ascii=False)
    table = arrow.table({"image": [encoded(i) for i in range(6)], "label": [0, 1, 2] * 2})
    library.write_table(table.replace_schema_metadata({"huggingface": encode(about)}), folder / "train.parquet")
    return open_source(folder).classes


def zip_classes(folder: Path, names: Sequence[str], encode: Encode) -> Sequence[str]:
    _write_zips(folder, [f"{i}.png\t{i}" for i in range(3)], str.encode)
    (folder / "classes.txt").write_bytes(encode("\n".join([*names, ""])))
    return open_source(folder).classes


def _write_zips(folder: Path, lines: Sequence[str], encode: Encode) -> None:
    for split in ("train", "val"):
        (folder / f"{split}_map.txt").write_bytes(encode("\n".join([*lines, ""])))
        with zipfile.ZipFile(folder / f"{split}.zip", "w") as archive:
            for entry in {line.partition("\t")[0] for line in lines}:
                archive.writestr(entry, encoded(0))


def zip_map(folder: Path, names: Sequence[str], encode: Encode) -> Sequence[str]:
    _write_zips(folder, [f"{name}/1.png\t{label}" for label, name in enumerate(names)], encode)
    split = open_source(folder).splits["train"]
    return [Path(split.name(i)).parts[1] for i in range(len(split.labels))]


def cifar_text(folder: Path, names: Sequence[str], encode: Encode) -> Sequence[str]:
    return _cifar(folder, True, encode("\n".join([*names, *map(str, range(7)), "", ""])))[:3]


def cifar_pickle(folder: Path, names: Sequence[str], encode: Encode) -> Sequence[str]:
    words = [encode(name) for name in (*names, *map(str, range(7)))]
    return _cifar(folder, False, pickle.dumps({b"label_names": words}, protocol=2))[:3]


def _cifar(folder: Path, binary: bool, names: bytes) -> Sequence[str]:
    files, _, _ = cifar_files(False, binary)
    for name, data in (files | {f"batches.meta{'.txt' * binary}": names}).items():
        (folder / name).write_bytes(data)
    return open_source(folder).classes


def hub_config(folder: Path, names: Sequence[str], encode: Encode) -> Sequence[str]:
    about = {"model_type": "vit", "id2label": {str(label): name for label, name in enumerate(names)}}
    (folder / "config.json").write_bytes(encode(json.dumps(about, ensure_ascii=False)))
    return read_image_hints({"config.json": read_object(folder / "config.json")}).class_names or ()


LABELS = {"repeated": None}
"""The name is at each image, so the images of a class repeat it."""
SOURCES: dict[Source, dict[str, str | None]] = {
    # A mark in the name of a file is not of its encoding but a part of the name.
    folders: LABELS | {"mark": CONTROL},
    tar_folders: LABELS | {"mark": CONTROL, "utf-16": None},
    csv_list: LABELS | {"blank": "line 3 of .* has no label"},
    cls_members: LABELS | {"blank": "is neither a whole number nor a name"},
    json_members: LABELS,
    classes_option: {},
    parquet: {},
    zip_classes: {},
    # Places of images, which are not names of classes.
    zip_map: {"nfd": None, "blank": None, "repeated": None, "control": None},
    cifar_text: {},
    cifar_pickle: {},
    hub_config: {"repeated": None},  # ImageNet has two cranes
}
"""Sources, and the cases that they answer in another way."""


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
def test_names_are_kept_or_refused(tmp_path: Path, source: Source, case: str) -> None:
    names, encoding, refused = CASES[case]
    refused = SOURCES[source].get(case, refused)
    if case == "utf-16" and source in (folders, tar_folders):
        names, refused = ("木林", "木木", "林林"), NOT_UTF8  # without bytes that are zero
    (folder := tmp_path / "source").mkdir()
    encode = lambda text: text.encode(encoding)  # noqa: E731
    if refused:
        with pytest.raises(ValueError, match=refused):
            source(folder, names, encode)
    else:
        read = source(folder, names, encode)
        assert [*read] == [*names] or [*read] == sorted({*names}), "as they are, in label or alphabetical order"


def test_labels_are_numbers_only_if_they_are_written_as_numbers(tmp_path: Path) -> None:
    """Python's int() also takes 1_0, which merged with 10."""
    for name in ("1_0", "1" * 5000):  # of so many digits Python makes no number
        (tmp_path / "list.csv").write_text("path,label\n" + f"a.png,{name}\nb.png,10\n" * 3)
        assert open_source(tmp_path / "list.csv").classes == sorted(["10", name])


CAT, NUMBERS = ("cat", "dog", "fox"), ("0", "1", "2")
ROWS: dict[str, tuple[Any, tuple[Any, ...], str, Any, str]] = {
    # names of the model, lists of names of the data, kind, outputs, words
    "equal": (CAT, (CAT,), "same", None, ""),
    "equal identifiers": (("n1", "n2"), (("cat", "dog"), ("n1", "n2")), "same", None, ""),
    "equal names that repeat": (("crane", "crane"), (("crane", "crane"),), "same", None, ""),
    "another order": (CAT, (("fox", "cat", "dog"),), "moved", (2, 0, 1), "matched by name with the 3"),
    "some of them": (CAT, (("fox", "dog"),), "moved", (2, 1), "the 2 classes of 'here' are matched"),
    "some identifiers": (CAT, (("Katze", "Hund"), ("cat", "dog")), "moved", (0, 1), ""),
    "numbers in another order": (NUMBERS, (("2", "1", "0"),), "moved", (2, 1, 0), ""),
    "one that is unknown": (("cat", "dog"), (CAT,), "mixed", None, "'cat', 'dog' lack 'fox' of 'here'"),
    "repeated names, moved": (("crane", "crane", "cat"), (("cat", "crane", "crane"),), "mixed", None, "repeat names"),
    "nothing in common": (CAT, (("a", "b", "c", "d"),), "other", None, "those of 'here' are 'a', 'b', 'c', … (4)"),
    "no names of the model": (None, (CAT,), "unnamed", None, ""),
    "no names of the data": (CAT, (), "unnamed", None, ""),
    "numbers for names": (CAT, (NUMBERS,), "unnamed", None, ""),
    "numbers for names of the model": (NUMBERS, (("cats", "dogs"), ("cat", "dog")), "unnamed", None, ""),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_classes_are_matched_by_name(row: tuple[Any, tuple[Any, ...], str, Any, str]) -> None:
    names, known, kind, outputs, words = row
    found = match_classes(names, SimpleNamespace(place="here", num_classes=3, names_of_classes=known))
    assert (found.kind, found.outputs) == (kind, outputs) and words in found.words
    assert bool(found.words) == (kind not in ("same", "unnamed"))
