"""Weights from the Hugging Face hub, named `hf:OWNER/NAME` or `hf:OWNER/NAME@REVISION`.

They are downloaded into huggingface_hub's cache, and its environment variables apply, such as HF_ENDPOINT,
HF_HUB_CACHE, HF_HUB_OFFLINE and HF_TOKEN. Only safetensors files and the JSON files next to them are downloaded, never
pickles. They are then imported as weights of other libraries are (``vitpar.weights.importing``).

huggingface_hub 2.4 joins what the server sends to paths without checking it: the ETag or the hash of a file becomes the
name of its blob, and the commit that of a folder. With `../` in them a server, such as a mirror, writes files outside
the cache. So vitpar asks for the list and the bytes of files only, and chooses every path itself.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from vitpar.checkpoint.index import first_line
from vitpar.errors import DataError, ModelError
from vitpar.io import write_text
from vitpar.text import literal, shown

PREFIX = "hf:"
"""Beginning of the names of weights on the hub."""
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
"""Files of weights: the index of several files, or the only file."""
TEXTS = ("config.json", "preprocessor_config.json", INDEX)
"""Text files that are downloaded."""
_NAME = re.compile(r"hf:([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@([\w+-][\w./+-]{0,199}))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_FILE = re.compile(r"[A-Za-z0-9][\w.-]{0,250}\.safetensors", re.ASCII)
"""Plain names: they become file names."""


@dataclass(frozen=True)
class HubName:
    """Name of weights on the hub."""

    repo: str
    """Owner and name."""
    revision: str | None
    """Branch, tag or commit; None for the main branch."""

    def __str__(self) -> str:
        return f"{PREFIX}{self.repo}{f'@{self.revision}' if self.revision else ''}"


def hub_name(text: str) -> HubName | None:
    """Return the name in `text`; None for a path, which does not begin with `hf:`.

    Raises DataError for a name that is incomplete or has other characters.
    """
    if not text.startswith(PREFIX):
        return None
    match = _NAME.fullmatch(text)
    if match is None or ".." in text or "--" in match[1]:
        raise DataError(
            f"'{shown(text)}' is not a name on the Hugging Face hub: write hf:OWNER/NAME or hf:OWNER/NAME@REVISION"
        )
    return HubName(match[1], match[2])


def fetch(name: HubName) -> Path:
    """Download weights into huggingface_hub's cache, and return their folder, whose name is the commit.

    Only the cache is used if the hub cannot be reached, or with HF_HUB_OFFLINE. Raises DataError.
    """
    try:
        import huggingface_hub as hub
        from huggingface_hub import constants
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
    except ImportError:
        raise DataError(f"{name} needs huggingface_hub: pip install -e '.[hub]'") from None
    try:
        info = hub.HfApi().model_info(name.repo, revision=name.revision, files_metadata=True)
    except GatedRepoError:
        raise DataError(
            f"{name} is gated: accept its conditions on its page, and log in with `hf auth login` or set HF_TOKEN"
        ) from None
    except RepositoryNotFoundError:
        raise DataError(
            f"there is no {PREFIX}{name.repo} on the hub, or you may not read it: correct the name, or log in with "
            "`hf auth login`"
        ) from None
    except RevisionNotFoundError:
        raise DataError(
            f"{PREFIX}{name.repo} has no revision '{name.revision}': name a branch, tag or commit"
        ) from None
    except Exception as error:  # errors of the network, whose classes differ between versions of huggingface_hub
        return _cached(hub, name, first_line(error))
    if not _COMMIT.fullmatch(info.sha or ""):
        raise DataError(f"the hub names {literal(info.sha)} as the commit of {name}: correct HF_ENDPOINT")
    sizes = {one.rfilename: one.size for one in info.siblings or ()}
    wanted = _wanted(name, sizes)
    # The layout of huggingface_hub's cache, so that it and vitpar find what the other downloaded.
    repo = Path(constants.HF_HUB_CACHE) / f"models--{name.repo.replace('/', '--')}"
    folder = repo / "snapshots" / info.sha
    _download(hub, name, folder, wanted, sizes)
    if INDEX in wanted:
        _download(hub, name, folder, _shards(name, folder, sizes), sizes)
    revision = name.revision or "main"
    if revision != info.sha:
        with suppress(OSError):  # a cache that may only be read: offline, the weights are then found by their commit
            (repo / "refs" / revision).parent.mkdir(parents=True, exist_ok=True)
            write_text(repo / "refs" / revision, info.sha)
    return folder


def imported(
    name: HubName,
    parent: Path,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Path, list[str]]:
    """Return the folder in `parent` with the imported weights, and sentences for the user if they were imported now.

    progress: callback (tensors done, tensors in total).

    Raises DataError, also for weights that need decisions which only `vitpar checkpoint import` offers.
    """
    source = fetch(name)
    folder = parent / f"{name.repo.replace('/', '--')}@{source.name[:12]}"
    from vitpar.weights.importing import import_weights

    try:
        parent.mkdir(parents=True, exist_ok=True)
        with (parent / ".lock").open("a") as lock:
            with suppress(OSError):  # a mount without locks
                fcntl.flock(lock, fcntl.LOCK_EX)  # another command may be importing the same weights
            if folder.is_dir():
                return folder, []
            done = import_weights(source, folder, progress=progress)
    except OSError as error:
        raise DataError(f"'{parent}' cannot be written: {error.strerror}") from None
    except (DataError, ModelError) as error:
        options = f" (options of `vitpar checkpoint import {name} --out DIR`)" if " --" in str(error) else ""
        raise DataError(f"{error}{options}") from None
    return folder, [f"{name} was imported into {folder}", *done.notes]


def _wanted(name: HubName, sizes: Mapping[str, int | None]) -> list[str]:
    """Return the files to download first: texts, and the weights unless they are in several files.

    sizes: bytes of each file of the repository.

    Raises DataError for a repository without usable safetensors.
    """
    texts = [file for file in TEXTS if file in sizes]
    if INDEX in sizes:
        return texts
    if WEIGHTS in sizes:
        return [*texts, WEIGHTS]
    from vitpar.weights.shards import listed  # imports torch, which not every command needs

    others = sorted(file for file in sizes if file.endswith((".safetensors", ".bin", ".pth", ".pt")))
    has = f"it has {listed(others)}" if others else "it has no weights"
    raise DataError(
        f"{name} has neither {WEIGHTS} nor {INDEX} ({has}): use another revision, or download a file that you trust "
        "and give it to `vitpar checkpoint import`"
    )


def _shards(name: HubName, folder: Path, sizes: Mapping[str, int | None]) -> list[str]:
    """Return the files that the index in `folder` lists. Raises DataError for those that the repository lacks."""
    from vitpar.weights.shards import listed, read_weight_map

    files = sorted(set(read_weight_map(folder, INDEX).values()))
    if wrong := [file for file in files if file not in sizes or not _FILE.fullmatch(file)]:
        raise DataError(f"{name} lacks {listed(wrong)}, which its index lists: use another revision")
    return files


def _download(hub: Any, name: HubName, folder: Path, files: list[str], sizes: Mapping[str, int | None]) -> None:
    """Download those of `files` that `folder`, whose name is the commit, lacks.

    Raises DataError, also for a file that is larger than listed.
    """
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    temporary = folder / f".download-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in (file for file in files if not (folder / file).exists()):
            expected = sizes[file]
            temporary.unlink(missing_ok=True)  # left by a killed process
            with temporary.open("xb") as opened:
                http_get(
                    hub.hf_hub_url(name.repo, file, revision=folder.name),
                    _Bounded(opened, expected or 0),
                    headers=build_hf_headers(),
                    expected_size=expected,
                    displayed_filename=file,
                )
            os.replace(temporary, folder / file)
    except Exception as error:  # of the network, the disk, or the cache
        raise DataError(f"{name} cannot be downloaded: {first_line(error)}") from None
    finally:
        with suppress(OSError):  # already renamed, or never created
            temporary.unlink()


class _Bounded:
    """File being downloaded, which refuses more bytes than the hub listed."""

    def __init__(self, file: BinaryIO, most: int) -> None:
        self._file, self._most = file, most

    def write(self, data: bytes) -> int:
        if self._file.tell() + len(data) > self._most:
            raise OSError(f"the hub sends more than {self._most:,} bytes")
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _cached(hub: Any, name: HubName, reason: str) -> Path:
    """Return the folder of weights that were downloaded before. reason: why the hub was not asked. Raises DataError."""
    words = (
        f"{name} was not downloaded before and the hub cannot be reached ({reason}): connect, or copy the model here"
    )
    try:
        snapshot = hub.snapshot_download(
            name.repo, revision=name.revision, local_files_only=True, allow_patterns=["config.json"]
        )
    except Exception:  # of several classes, by version
        raise DataError(words) from None
    folder = Path(snapshot)
    if not any((folder / file).exists() for file in (INDEX, WEIGHTS)):
        raise DataError(words)
    return folder
