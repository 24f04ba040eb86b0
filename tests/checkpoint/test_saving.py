"""Checkpoints written in the background: shares of ranks, content, when they count as complete, and errors."""

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from helpers.ranks import Ranks, exits
from vitpar.checkpoint import atomic
from vitpar.checkpoint.folder import Checkpoint, Checkpoints
from vitpar.checkpoint.image import SafetensorsBuffer
from vitpar.checkpoint.reader import load_tensors
from vitpar.checkpoint.writer import BUSY, DONE, FAILED, Held, Writer, divide, held
from vitpar.errors import CheckpointError
from vitpar.launch import ALONE, join

KINDS = {
    "scalar": torch.tensor(7.0),
    "flags": torch.tensor([True, False, True]),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "halves": torch.randn(3, 5).bfloat16(),
    "doubles": torch.randn(2, 3, 4, dtype=torch.float64),
    "step": torch.tensor(2**40),
    "floats": torch.randn(7, 1),
    "fp16": torch.randn(3).half(),
    "ints": torch.arange(3, dtype=torch.int32),
}


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event; file writes block until it is set."""
    goes_on, write = threading.Event(), atomic.write

    def waiting(path: Path, content: bytes | memoryview) -> Any:
        assert goes_on.wait(60)
        return write(path, content)

    monkeypatch.setattr(atomic, "write", waiting)
    return goes_on


def test_written_file_is_readable_by_safetensors(tmp_path: Path) -> None:
    image = SafetensorsBuffer({name: (tensor.dtype, tensor.shape) for name, tensor in KINDS.items()}, pinned=False)
    image.stage(KINDS)
    stored = atomic.write(tmp_path / "file.safetensors", image.content)
    assert stored.bytes == (tmp_path / "file.safetensors").stat().st_size
    read = load_file(tmp_path / "file.safetensors")
    assert read.keys() == KINDS.keys()
    for name, tensor in KINDS.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)


def ended(writer: Writer) -> None:
    """Wait until this process's background work is done."""
    end = time.monotonic() + 60
    while writer.progress == BUSY:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_tensors_may_change_while_they_are_being_written(
    alone: None, tmp_path: Path, slow_disk: threading.Event
) -> None:
    writer, tensor = Writer(), torch.ones(1000)
    writer.begin(tmp_path / "step_1", {"a": tensor}, {"state.json": "{}"})
    writer.staged()
    tensor.fill_(2.0)
    assert writer.progress == BUSY
    assert writer.advance(BUSY) is None and not (tmp_path / "step_1").exists()
    slow_disk.set()
    ended(writer)
    assert writer.advance(DONE) is None  # all shards are written; rank 0 now writes the index
    ended(writer)
    saved = writer.advance(DONE)
    assert saved and saved.folder == tmp_path / "step_1" and saved.bytes > 4000
    load_tensors(tmp_path / "step_1", {"a": tensor})
    assert torch.equal(tensor, torch.ones(1000))
    assert writer.finish() is None


def test_checkpoints_of_changing_tensors_are_written_one_at_a_time(
    alone: None, tmp_path: Path, slow_disk: threading.Event
) -> None:
    writer = Writer()
    writer.begin(tmp_path / "step_1", {"a": torch.ones(3)}, {})
    threading.Timer(0.1, slow_disk.set).start()
    writer.begin(tmp_path / "step_2", {"a": torch.zeros(3), "b": torch.ones(2)}, {})
    assert (tmp_path / "step_1" / "index.json").exists()
    writer.begin(tmp_path / "step_3", {"b": torch.zeros(5)}, {})
    writer.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_2", "step_3"]
    for step, sizes in ((2, {"a": 3, "b": 2}), (3, {"b": 5})):
        found = {name: torch.full((size,), 7.0) for name, size in sizes.items()}
        load_tensors(tmp_path / f"step_{step}", found)
        assert all(torch.equal(x, torch.full_like(x, float(name == "b" and step == 2))) for name, x in found.items())


def sharded(rows: int) -> Mapping[str, Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    own = {f"of rank {dist.get_rank()}": torch.full((2,), float(dist.get_rank()))}
    whole = torch.arange(rows * 3.0).reshape(rows, 3)
    return {**own, "rows": distribute_tensor(whole, mesh, [Shard(0)]), "same": torch.ones(4)}


def fails_on(device: torch.device, folder: Path, rank: int, where: str) -> list[Any]:
    """Save once, then save again while `rank` cannot write files named `where`.

    Return the error; runs on every rank.
    """
    writer, write = Writer(), atomic.write
    tensors = sharded(5)
    writer.begin(folder / "step_1", tensors, {"state.json": "{}"})
    writer.finish()

    def full(path: Path, content: bytes | memoryview) -> Any:
        if path.name.startswith(where):
            raise OSError(28, "No space left on device")
        return write(path, content)

    atomic.write = full if dist.get_rank() == rank else write
    try:
        writer.begin(folder / "step_2", tensors, {"state.json": "{}"})
        for _ in range(2):
            ended(writer)
            worst = torch.tensor(writer.progress)
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            writer.advance(worst.item())
    except CheckpointError as error:
        return [str(error), worst.item(), writer.finish()]
    finally:
        atomic.write = write
    return []


def test_full_disk_is_an_error_on_every_rank(tmp_path: Path, ranks: Ranks) -> None:
    """All ranks must stop together; otherwise the healthy ones would wait for the failed one."""
    for rank, where in ((1, "shard"), (0, "shard"), (0, "index")):
        folder = tmp_path / f"{where}{rank}"
        for message, worst, left in ranks(2).run(fails_on, folder, rank, where):
            assert f"step_2' cannot be written (rank {rank}: No space left on device)" in message
            assert worst == FAILED and left is None
        assert [path.name for path in folder.iterdir()] == ["step_1"]


def uneven(device: torch.device, folder: Path) -> list[bool]:
    """Save more rows than ranks, and fewer. Return whether this rank reads its own shards back; runs on every rank."""
    answers, writer = [], Writer()
    for rows in (5, 1):
        tensors = sharded(rows)
        writer.begin(folder / str(rows), tensors, {})
        writer.finish()
        found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        load_tensors(folder / str(rows), found)
        parts = [tuple(getattr(t, "_local_tensor", t) for t in (found[name], tensors[name])) for name in tensors]
        answers.append(all(torch.equal(*pair) for pair in parts))
    return answers


def test_each_rank_writes_and_reads_its_own_shards(tmp_path: Path, ranks: Ranks) -> None:
    assert ranks(3).run(uneven, tmp_path) == [[True, True]] * 3
    assert load_file(tmp_path / "1" / "shard-00001-of-00003.safetensors").keys() >= {"rows", "of rank 0"}


def test_shard_invisible_to_rank_0_is_an_error(alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On several machines, the run folder may be a different local folder on each."""
    monkeypatch.setattr("vitpar.checkpoint.writer.SEEN_S", 0.2)
    writer = Writer()
    writer.begin(tmp_path / "step_1", {"a": torch.ones(3)}, {})
    ended(writer)
    (shard,) = (tmp_path / "step_1.partial").iterdir()
    shard.unlink()
    with pytest.raises(CheckpointError, match="No such file or directory; check that all machines share the folder"):
        writer.finish()
    assert list(tmp_path.iterdir()) == []


def test_failures_keep_a_complete_checkpoint(alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The callback runs when a checkpoint is complete, so its failure must not undo it, nor may that of a later one."""
    writer, replace = Writer(), os.replace

    def refuse_callback() -> None:
        raise PermissionError(13, "Permission denied")

    def refuse(source: Path, target: Path) -> None:
        if source.suffix == ".partial":
            raise OSError(5, "Input/output error")
        replace(source, target)

    writer.begin(tmp_path / "step_1", {"a": torch.ones(3)}, {}, published=refuse_callback)
    assert writer.finish() and (tmp_path / "step_1" / "index.json").exists()
    monkeypatch.setattr(os, "replace", refuse)
    writer.begin(tmp_path / "step_1", {"a": torch.zeros(3)}, {})
    with pytest.raises(CheckpointError, match="Input/output error"):
        writer.finish()
    load_tensors(tmp_path / "step_1", {"a": (found := torch.zeros(3))})
    assert torch.equal(found, torch.ones(3))


def half_copied(image: SafetensorsBuffer, tensors: Mapping[str, Tensor]) -> None:
    for view in list(image._views.values())[::2]:
        view.zero_()


def half_written(path: Path, content: bytes | memoryview) -> None:
    path.write_bytes(memoryview(content)[: len(content) // 2])


def half_removed(folder: Path, **_: Any) -> None:
    for file in sorted(folder.iterdir())[::2]:
        file.unlink()


PLACES: dict[str, tuple[Any, str, Callable[..., None], Callable[..., bool]]] = {
    "the copy": (SafetensorsBuffer, "stage", half_copied, lambda image, tensors: True),
    "the shard": (atomic, "write", half_written, lambda path, _: path.name.startswith("shard-")),
    "the index": (atomic, "write", half_written, lambda path, _: path.name == "index.json"),
    "the last rename": (atomic, "publish", lambda folder: None, lambda folder: True),
    "the removal": (atomic.shutil, "rmtree", half_removed, lambda path, **_: path.match("*.removed") and path.exists()),
}
"""Places in a save: owner and name of a function, what it does by half, and whether a call is of that place."""


def save_and_die(folder: Path, place: str) -> None:
    """Save step 1, then save and remove checkpoints until this process dies at `place`."""
    join(ALONE, "cpu")
    writer, there = Writer(), Checkpoints(folder)
    state = {"state.json": '{"step": 1, "samples": 8, "data": ""}'}
    writer.begin(there.path(1), KINDS, state)
    writer.finish()
    owner, name, do_half, applies = PLACES[place]
    whole = getattr(owner, name)

    def called(*args: Any, **options: Any) -> Any:
        if applies(*args, **options):
            do_half(*args, **options)
            os._exit(9)
        return whole(*args, **options)

    setattr(owner, name, called)
    writer.begin(there.path(2), KINDS, state)
    writer.finish()
    there.keep([2])


@pytest.mark.parametrize("place", PLACES)
def test_process_killed_in_a_save_leaves_complete_checkpoints_only(place: str, tmp_path: Path) -> None:
    assert [code for code, _ in exits(save_and_die, [{}], tmp_path, place)] == [9]
    there = Checkpoints(tmp_path)
    there.clear()
    # Before its last rename a checkpoint is complete; the one that is removed is step 1.
    assert there.steps() == {"the last rename": [1, 2], "the removal": [2]}.get(place, [1])
    assert all(Checkpoint.open(there.path(step)).damage() is None for step in there.steps())
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step_{step}" for step in there.steps()]


def test_replicated_tensors_are_balanced_by_bytes_and_parts_must_fill_them() -> None:
    everyone: list[list[Held]] = [[(f"t{n}", "float32", (n + 1,), (0,), (n + 1,)) for n in range(100)]] * 4
    names, _ = divide(everyone)
    loads = [sum(4 * (int(name[1:]) + 1) for name in mine) for mine in names]
    assert sum(loads) == 4 * 5050 and max(loads) - min(loads) <= 400
    everyone = [[("t", "float32", (4,), (0,), (3,))], [("t", "float32", (4,), (2,), (2,))]]
    with pytest.raises(AssertionError, match="the parts of t fill it"):
        divide(everyone)
    tensors = {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "scalar": torch.tensor(1.0)}
    assert held(tensors) == [("a", "bfloat16", (2, 3), (0, 0), (2, 3)), ("scalar", "float32", (), (), ())]
