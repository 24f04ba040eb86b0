"""Copies of data sets, runs, checkpoints and weights, from a disk to object storage or back.

A copy never looks complete before it is. On a disk it has another name until then. Object storage cannot rename, so the
files that make a folder complete (`LAST`) are removed first and written last.
"""

import errno
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from vitpar.checkpoint import atomic
from vitpar.checkpoint.folder import Checkpoint
from vitpar.checkpoint.index import INDEX, STATE
from vitpar.data.shards.manifest import MANIFEST, read_manifest, read_rows
from vitpar.errors import CheckpointError, DataError, RecipeError
from vitpar.object_store import ObjectPath, parse_place
from vitpar.text import shown

LAST = (MANIFEST, INDEX, "model.safetensors.index.json", "adapter_config.json")
"""Names of the files without which a folder is no data set, checkpoint or folder of weights."""
_RUN = ("recipe.toml", "plan.json", "env.json", "log.txt", "metrics.jsonl")
"""Records of a run that a resumed run needs, or shows."""
_CHECKPOINTS, WEIGHTS = "checkpoints", "weights"
_AT_ONCE = 8  # files that are copied at once
_PIECE = 8 << 20  # bytes of a file on its way
Progress = Callable[[int, int], None]
"""Called with the number of files that are copied, and of all."""


def upload(source: Path, target: ObjectPath, progress: Progress | None = None) -> int:
    """Copy a folder to object storage and return the number of files. Files of other names stay there.

    Links are followed. Unfinished folders and hidden files are left out.

    Raises DataError if a file cannot be read or written.
    """
    files = {str(path.relative_to(source)): path for path in sorted(source.rglob("*")) if path.is_file()}
    for name in [*files]:
        if any(part.startswith(".") or part.endswith((".partial", ".removed")) for part in PurePosixPath(name).parts):
            del files[name]
    if not files:
        raise DataError(f"'{source}' has no files: name the folder of a data set, a run, a checkpoint or weights")
    try:
        _remove(target, [name for name in target.files() if name in files and _is_last(name)])
        _upload(target, files, progress)
    except OSError as error:
        raise DataError(f"cannot copy '{source}' to '{target}': {_reason(error)}") from None
    return len(files)


def download(source: ObjectPath, target: Path, progress: Progress | None = None) -> int:
    """Copy a folder of object storage to a new folder, verify it, and return the number of files.

    Raises DataError for a folder that exists or is empty, a file that cannot be copied, and damage.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise DataError(f"'{target}' exists: name a new folder")
    part = atomic.partial(target)
    try:
        found = source.files()
        for name in found:
            if not name.isprintable() or {"", ".", ".."} & {*name.split("/")} or "\\" in name:
                raise DataError(f"'{source}' has an object '{shown(name)}', which is no name of a file: do not copy it")
        if not found:
            raise DataError(f"there are no files in '{source}': name the folder of a data set, a run or weights")
        atomic.begin(target)
        paths = {name: part / name for name in found}
        for folder in {path.parent for path in paths.values()}:
            folder.mkdir(parents=True, exist_ok=True)

        def fetch(name: str) -> None:
            with (source / name).open() as reader, paths[name].open("xb") as file:
                shutil.copyfileobj(reader, file, _PIECE)
                file.flush()
                os.fsync(file.fileno())

        _each(fetch, [list(paths)], progress)
        _verify(part, found)
        atomic.publish(target)
    except OSError as error:
        raise DataError(f"cannot copy '{source}' to '{target}': {_reason(error)}") from None
    except (CheckpointError, DataError):
        shutil.rmtree(part, ignore_errors=True)
        raise
    return len(found)


def upload_checkpoint(checkpoint: Path, target: ObjectPath, kept: Collection[int]) -> None:
    """Copy a new checkpoint and its run's records to `target`, and remove all there but `kept`. Raises OSError."""
    run = checkpoint.parents[1]
    base = target / _CHECKPOINTS
    listed = base.files()
    name = checkpoint.name
    _remove(base, sorted((path for path in listed if path.startswith(f"{name}/")), key=_is_last, reverse=True))
    _upload(base, {f"{name}/{path.name}": path for path in checkpoint.iterdir()})
    _upload(target, {name: run / name for name in _RUN if (run / name).is_file()})
    keep = {f"step_{step}" for step in kept} | {name}
    gone = [path for path in listed if path.partition("/")[0] not in keep]
    _remove(base, sorted(gone, key=_is_last, reverse=True))


def upload_end(run: Path, copy_to: str) -> str | None:
    """Copy the final weights of a run and its records, and return a warning if that fails; else None."""
    target = ObjectPath.parse(copy_to)
    try:
        upload(run / WEIGHTS, target / WEIGHTS)
        _upload(target, {name: run / name for name in _RUN})
    except (DataError, OSError) as error:
        why = _reason(error) if isinstance(error, OSError) else str(error)
        return f"the final weights were not copied to '{target}': {why}: copy them with `vitpar copy {run} {target}`"
    return None


def refuse_used(copy_to: str | None, resuming: bool) -> None:
    """Raise RecipeError for a folder of copies that cannot be used, or, unless `resuming`, that has a run."""
    if copy_to is None:
        return
    target = parse_place(copy_to)
    try:
        used = isinstance(target, ObjectPath) and bool(target.files())
    except OSError as error:
        raise RecipeError(f"checkpoint.copy_to '{target}' cannot be listed: {error.strerror}: correct it") from None
    if used and not resuming:
        raise RecipeError(
            f"checkpoint.copy_to '{target}' is not empty: name another folder, or copy that run with `vitpar copy "
            f"{target} DIR` and resume it"
        )


def _upload(target: ObjectPath, files: dict[str, Path], progress: Progress | None = None) -> None:
    """Write `files` by their names in `target`, those of LAST after all others. Raises OSError."""

    def send(name: str) -> None:
        with files[name].open("rb") as file:
            (target / name).write(file)

    _each(send, [[name for name in files if _is_last(name) is last] for last in (False, True)], progress)


def _remove(target: ObjectPath, names: Iterable[str]) -> None:
    """Remove objects one after another, in this order. Raises OSError."""
    for name in names:
        (target / name).remove()


def _each(work: Callable[[str], None], groups: Sequence[Sequence[str]], progress: Progress | None) -> None:
    """Call `work` for each name, several at once, group by group. Raises the first error when all begun calls end."""
    done, total = 0, sum(map(len, groups))
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="vitpar-copy") as pool:
        for names in groups:
            for _ in pool.map(work, names):
                done += 1
                if progress:
                    progress(done, total)


def _verify(folder: Path, found: Iterable[str]) -> None:
    """Compare checkpoints and data sets with their checksums. Raises CheckpointError and DataError."""
    for name in found:
        path = folder / name
        is_checkpoint = path.name == INDEX and path.with_name(STATE).is_file()
        if is_checkpoint and (wrong := Checkpoint.open(path.parent).damage()):
            raise CheckpointError(f"the copy of '{shown(name)}' is damaged: {wrong}: copy it again")
        if path.name == MANIFEST:
            manifest = read_manifest(path.parent)
            for split, entry in manifest.splits.items():
                read_rows(path.parent, split, entry)
                for shard in entry.shards:
                    if not (file := path.parent / shard.file).is_file() or file.stat().st_size != shard.bytes:
                        raise DataError(f"the copy lacks shard '{shown(shard.file)}', or a part of it: copy it again")


def _is_last(name: str) -> bool:
    return PurePosixPath(name).name in LAST


def _reason(error: OSError) -> str:
    place = f" ('{shown(str(error.filename))}')" if error.filename else ""
    return f"{error.strerror or errno.errorcode.get(error.errno or 0, 'failed')}{place}"
