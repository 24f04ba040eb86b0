"""Shard streams: which rank reads which shard, the number of batches, permission for commands, and fault handling."""

import gzip
import os
import socket
import stat
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from webdataset import TarWriter

from helpers.small_data import first
from helpers.streamed_shards import served, write_shards
from helpers.tiny_images import saved
from vitpar.data.shards.index import Labels
from vitpar.data.stream import urls
from vitpar.data.stream.loader import StreamLoader
from vitpar.data.stream.stream_set import Reader, StreamPart, StreamSet
from vitpar.data.transforms.sample import EvalTransform, TrainTransform
from vitpar.errors import DataError
from vitpar.models import IGNORED

SIZES = (5, 1, 7, 4, 3)
COUNT = sum(SIZES)
TRAIN, EVAL = TrainTransform(8), EvalTransform(8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write twenty noise images in five shards of different sizes. Each image's label is its number."""
    place = tmp_path_factory.mktemp("shards")
    assert write_shards(place, "train", SIZES) == COUNT
    return place


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with served(folder) as found:
        yield found


def stream(pattern: str, allow_pipe: bool = False, **settings: Any) -> StreamSet:
    return StreamSet(
        urls.expand(pattern), COUNT, COUNT, settings.pop("labels", Labels()), allow_pipe=allow_pipe, **settings
    )


def whole(address: str, **settings: Any) -> StreamSet:
    return stream(f"{address}/train-{{0..4}}.tar", **settings)


def loaded(data: StreamSet, batches: int, *, batch_size: int = 4, seed: int = 0, **settings: Any) -> list[Any]:
    """Return the first training batches."""
    return first(StreamLoader(data, TRAIN, batch_size=batch_size, seed=seed, **settings), batches)


def labels_of(batches: list[Any]) -> list[int]:
    found = torch.cat([batch.labels for batch in batches])
    return found[found != IGNORED].tolist()


def stream_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(("vitpar-stream", "vitpar-ahead"))]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle_buffer", [0, 1, 6, 1000])
def test_pass_over_http_has_every_sample_once(address: str, workers: int, shuffle_buffer: int) -> None:
    batches = loaded(whole(address, shuffle_buffer=shuffle_buffer), 10, workers=workers)
    first, second = labels_of(batches[:5]), labels_of(batches[5:])
    assert sorted(first) == sorted(second) == list(range(COUNT))
    assert first != second and first != sorted(first)
    keys = torch.cat([batch.keys for batch in batches]).tolist()
    assert len(set(keys)) == 2 * COUNT and min(keys) > 0
    assert [batch.samples for batch in batches[:2]] == [4, 8] and batches[-1].epoch == 2.0
    assert not batches[0].whole and not stream_threads()


def test_shuffle_buffer_mixes_shards_and_seed_fixes_the_order(folder: Path) -> None:
    data, shard_of = whole(str(folder)), [i for i, size in enumerate(SIZES) for _ in range(size)]
    changes = {}
    for size in (0, 1000):
        shards = [shard_of[i] for i in labels_of(loaded(whole(str(folder), shuffle_buffer=size), 5))]
        changes[size] = sum(a != b for a, b in pairwise(shards))
    assert changes[0] == len(SIZES) - 1 and changes[1000] > len(SIZES)
    first, again, other = (labels_of(loaded(data, 5, seed=seed)) for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_parts_are_disjoint_and_cover_all_samples(folder: Path, parts: int) -> None:
    data, seen, keys = whole(str(folder)), [], {}
    for number in range(parts):
        part = StreamPart(number, parts)
        reader = Reader(data, part, 0, bad_sample="fail", stopping=threading.Event())
        assert len({tuple(reader.pass_shards(turn)) for turn in range(12)}) > 1
        count = sum(SIZES[shard] for shard in reader.pass_shards(0))
        samples = list(islice(reader.endless(0), count))
        seen += [sample.label for sample in samples]
        keys |= {sample.label: sample.key for sample in samples}
    assert sorted(seen) == list(range(COUNT))
    (alone,) = loaded(data, 1, batch_size=COUNT)
    assert keys == dict(zip(alone.labels.tolist(), alone.keys.tolist(), strict=True)), "who reads changes no key"


def test_pixels_do_not_depend_on_workers(address: str) -> None:
    alone, *others = (loaded(whole(address), 8, batch_size=6, workers=workers) for workers in (0, 2, 4))
    for batches in others:
        for a, b in zip(alone, batches, strict=True):
            assert torch.equal(a.images, b.images) and torch.equal(a.keys, b.keys) and torch.equal(a.labels, b.labels)
    assert len({image.numpy().tobytes() for batch in alone for image in batch.images}) == 48, "augmented anew"


def test_a_sample_has_another_key_in_every_pass(folder: Path) -> None:
    batches = loaded(StreamSet((f"{folder}/train-2.tar",), 7, COUNT, Labels()), 2, batch_size=7)
    first, second = (dict(zip(batch.labels.tolist(), batch.keys.tolist(), strict=True)) for batch in batches)
    assert first.keys() == second.keys() and not {*first.values()} & {*second.values()}


def test_all_ranks_have_equally_many_batches(folder: Path) -> None:
    """Three ranks decode different numbers of rows, and one decodes none.

    Unequal numbers of batches would hang training.
    """
    data = whole(str(folder))
    rows = [[0, 1, 2], [3, 4], [5]]
    ranks = [loaded(data, 30, batch_size=6, rows=mine, part=StreamPart(i, 3), workers=0) for i, mine in enumerate(rows)]
    ranks.append(loaded(data, 30, batch_size=6, rows=[], part=None))
    for batches in zip(*ranks, strict=True):
        for batch, mine in zip(batches, [*rows, []], strict=True):
            others = [row for row in range(6) if row not in mine]
            assert (batch.labels[others] == IGNORED).all() and not batch.keys[others].any()
            assert (batch.labels[mine] != IGNORED).all() and (batch.keys[mine] > 0).all()
            assert batch.images is None if not mine else len(batch.images) == len(mine)


def test_resumed_stream_starts_a_pass_in_a_new_order(folder: Path) -> None:
    """This includes a run that stopped twice in one pass.

    With the old order, a run that stops often would see only the first samples.
    """
    data = whole(str(folder))
    orders, keys = set(), set()
    for start in (0, 4, 8, COUNT - 1, COUNT, COUNT + 1):
        batches = loaded(data, 5, start=start)
        assert sorted(labels_of(batches)) == list(range(COUNT)) and batches[0].samples == start + 4
        orders.add(tuple(labels_of(batches)))
        keys |= {key for batch in batches for key in batch.keys.tolist()}
        assert labels_of(loaded(data, 5, start=start)) == labels_of(batches)
    assert len(orders) == 6 and len(keys) == 6 * COUNT


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("parts", [1, 2, 7])
def test_evaluation_has_every_sample_once_even_with_few_shards(address: str, parts: int, workers: int) -> None:
    seen = []
    for number in range(parts):
        rows = [number, number + parts]
        loader = StreamLoader(
            whole(address), EVAL, batch_size=2 * parts, rows=rows, part=StreamPart(number, parts), workers=workers
        )
        batches = list(islice(loader, 12))
        ended = [batch.ended for batch in batches].index(True)
        assert all(batch.ended for batch in batches[ended:])
        assert ended == -(-sum(SIZES[number::parts]) // 2)
        assert all(batch.images.shape == (2, 3, 8, 8) for batch in batches)
        assert not any(batch.images[batch.labels[rows] == IGNORED].any() for batch in batches)
        seen += labels_of(batches)
    assert sorted(seen) == list(range(COUNT))
    assert not stream_threads()


def test_labels_are_read_from_json(tmp_path: Path) -> None:
    with TarWriter(str(tmp_path / "a.tar")) as writer:
        for label in range(3):
            sample = {"png": saved(np.full((8, 8, 3), label)), "json": {"class": label}, "npy": np.zeros(4)}
            writer.write({"__key__": f"x/{label}", **sample})
    data = stream(str(tmp_path / "a.tar"), labels=Labels.parse("json:class"))
    assert sorted(labels_of(loaded(data, 1, batch_size=3))) == [0, 1, 2]
    with pytest.raises(DataError, match="has no field 'label'"):
        loaded(stream(str(tmp_path / "a.tar"), labels=Labels.parse("json")), 1)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("pipe:cat train-{0..4}.tar", "'pipe:cat train-0.tar' runs a shell command, which is disabled"),
        ("s3://key:secret@b/a.tar", "'s3://b/a.tar' is not a name such as s3://BUCKET/FOLDER: write it so, and set"),
        ("gs://b/a.tar", "'gs://b/a.tar' runs the command `gsutil cat`, which is disabled"),
        ("{http://h/a.tar,pipe:touch x}", "'pipe:touch x' runs a shell command"),
        ("PIPE:touch x", "'PIPE:touch x' cannot be streamed: use http://"),
        ("ais://b/a.tar", "cannot be streamed: use http://, https://, s3://, gs://, a path, or pipe:COMMAND"),
        ("train-{0..4.tar", "'train-{0..4.tar' has unbalanced or too many braces"),
        ("a-{1,1}.tar", "shard 'a-1.tar' is in the stream twice"),
        ("", "has an empty shard name"),
    ],
)
def test_unsafe_or_invalid_urls_are_refused_before_opening(
    pattern: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: pytest.fail("a command was run"))
    with pytest.raises(DataError, match=message.replace("{", r"\{").replace("|", r"\|")) as caught:
        stream(pattern)
    assert "\n" not in str(caught.value)


def test_stream_refuses_labels_from_folders() -> None:
    with pytest.raises(DataError, match=r"so stream\.label cannot be 'folder': use cls or json:FIELD"):
        stream("a.tar", labels=Labels("folder"))


def test_allowed_commands_run(folder: Path) -> None:
    data = stream(f"pipe:cat '{folder}'/train-{{0..4}}.tar | cat", allow_pipe=True)
    assert sorted(labels_of(loaded(data, 5))) == list(range(COUNT))


def test_google_storage_is_read_with_its_command_line_tool(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The URL is passed as an argument, without a shell, so it cannot inject commands."""
    fake = tmp_path / "gsutil"
    fake.write_text(f'#!/bin/sh\nfor word; do echo "$word"; done >> {tmp_path}/words\ncat {folder}/train-2.tar\n')
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    url = "gs://bucket/a;touch pwned;.tar"
    assert len(labels_of(loaded(stream(url, allow_pipe=True), 7, batch_size=1, workers=0))) == 7
    assert (tmp_path / "words").read_text().splitlines() == ["cat", url]
    assert not (tmp_path / "pwned").exists()


@pytest.fixture
def faulty(folder: Path, tmp_path: Path) -> Path:
    """Write the shards again, for a test to damage."""
    write_shards(tmp_path, "train", SIZES)
    return tmp_path


def spoil(name: str, place: Path) -> tuple[str, str, int]:
    """Damage shard 2, which has 7 samples.

    Return a URL pattern, the error text, and the number of its readable samples.
    A number of -1 means that it is not known.
    """
    shard, pattern = place / "train-2.tar", f"{place}/train-{{0..4}}.tar"
    match name:
        case "missing":
            shard.unlink()
            return pattern, f"shard '{shard}' cannot be opened: No such file or directory", 0
        case "cut between members":
            with tarfile.open(shard) as tar:
                end = [member.offset for member in tar][7]  # three samples, and a label without its image
            shard.write_bytes(shard.read_bytes()[:end])
            return pattern, f"shard '{shard}' cannot be read to its end: it is truncated", 3
        case "no tar file":
            shard.write_bytes(b"not found\n" * 200)
            return pattern, f"shard '{shard}' cannot be read to its end: ", 0
        case "web page":
            shard.write_bytes(b"<html>not found</html>" * 100)
            return pattern, f"shard '{shard}' cannot be opened: it is a web page: fetch the file itself", 0
        case "compressed":
            shard.write_bytes(gzip.compress(shard.read_bytes()))
            return pattern, f"shard '{shard}' cannot be read to its end: it is compressed; decompress it, as in", -1
    raise AssertionError(name)


FAULTS = ["missing", "cut between members", "no tar file", "web page", "compressed"]


@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_shard_fails_by_name_or_is_skipped_and_counted(fault: str, faulty: Path) -> None:
    pattern, message, left = spoil(fault, faulty)
    for workers in (0, 2):
        with pytest.raises(DataError) as caught:
            loaded(stream(pattern), 5, workers=workers)
        assert str(caught.value).startswith(message) and "set data.bad_sample to skip" in str(caught.value)
        assert "\n" not in str(caught.value) and not stream_threads()
    loader = StreamLoader(stream(pattern), EVAL, batch_size=4, bad_sample="skip", workers=2)
    found = labels_of(list(islice(loader, 12)))
    lost = set(range(6, 13))
    assert len(found) == len(set(found)) and set(range(COUNT)) - set(found) <= lost
    assert left < 0 or len(found) == COUNT - 7 + left
    assert loader.skipped.shards == 1 and loader.skipped.times == 0 and loader.skipped.problems[0].startswith(message)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("{address}/gone-0.tar", "curl ended with exit code 22 (the server returned an error); restore it, or set"),
        ("{address}/cut/train-2.tar", "curl ended with exit code 18 (the transfer was interrupted)"),
        ("http://127.0.0.1:1/a.tar", "curl ended with exit code 7 (the host does not answer)"),
        ("pipe:cat {folder}/train-2.tar; exit 3", "its command ended with exit code 3"),
        ("pipe:exit 3", "its command ended with exit code 3"),
    ],
)
def test_network_and_command_errors_are_reported(url: str, message: str, address: str, folder: Path) -> None:
    shard = url.format(address=address, folder=folder)
    with pytest.raises(DataError) as caught:
        loaded(stream(shard, allow_pipe=True), 5)
    assert str(caught.value).startswith(f"shard '{shard}' cannot be read to its end: {message}")
    loader = StreamLoader(stream(shard, allow_pipe=True), EVAL, batch_size=4, bad_sample="skip")
    assert list(islice(loader, 6))[-1].ended and loader.skipped.shards == 1
    if "train-2" not in url:
        with pytest.raises(DataError, match=r"none of the 1 shard that part 0 of 1 read from .* has a usable image"):
            loaded(stream(shard, allow_pipe=True), 5, bad_sample="skip")


def test_silent_stream_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stalled connection would otherwise hang the training."""
    data = stream("pipe:exec sleep 3600", allow_pipe=True)
    monkeypatch.setattr(urls, "_SILENT_S", 0.5)
    with pytest.raises(DataError, match="cannot be read to its end: no data for 0 s"):
        loaded(data, 1)
    assert not stream_threads()


def test_closing_stops_a_reader_that_waits(folder: Path, tmp_path: Path) -> None:
    """The command prints a complete shard and then nothing for an hour. Closing must kill it."""
    command = f"pipe:echo $$ >> {tmp_path}/pid; cat {folder}/train-2.tar; exec sleep 3600"
    data = stream(command, allow_pipe=True, shuffle_buffer=0)
    batches = iter(StreamLoader(data, TRAIN, seed=0, batch_size=2, workers=2))
    next(batches)
    batches.close()
    assert not stream_threads()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_sample_fails_by_name_or_is_skipped_and_counted(tmp_path: Path, workers: int) -> None:
    good = saved(np.zeros((8, 8, 3)))
    members = {
        "good": {"png": good, "cls": b"1"},
        "bad": {"png": good[:40], "cls": b"1"},
        "lonely": {"png": good},
        "double": {"png": good, "jpg": good, "cls": b"1"},
        "word": {"png": good, "cls": b"cat"},
    }
    messages = {
        "bad": "sample 'bad' of '{}': its header cannot be read",
        "lonely": "sample 'lonely' of '{}' has no label (.cls)",
        "double": "sample 'double' of '{}' has 2 images",
        "word": "label 'cat' of 'word.cls' of '{}' is a name, but a stream knows numbers only",
    }
    for name, message in messages.items():
        path = tmp_path / f"{name}.tar"
        with TarWriter(str(path)) as writer:
            for key in ("good", name):
                writer.write({"__key__": key, **members[key]})
        with pytest.raises(DataError) as caught:
            loaded(stream(str(path)), 1, batch_size=2, workers=workers)
        assert str(caught.value).startswith(message.format(path))
        loader = StreamLoader(stream(str(path)), TRAIN, seed=0, batch_size=2, bad_sample="skip", workers=workers)
        first, second = islice(loader, 2)
        assert loader.skipped.shards == 0 and loader.skipped.times >= 2
        assert loader.skipped.problems[0].startswith(message.format(path))
        assert labels_of([first, second]) == [1] * (2 if name == "bad" else 4)


def test_label_out_of_range_is_never_skipped(folder: Path) -> None:
    """It means that stream.classes is wrong, not that one sample is bad."""
    data = StreamSet((f"{folder}/train-2.tar",), 7, 10, Labels())
    with pytest.raises(DataError, match=r"label 1[0-2] of sample '00.*' is outside the 10 classes of stream\.classes"):
        loaded(data, 5, bad_sample="skip")


@pytest.mark.timeout(60)
def test_redirects_stay_in_the_web() -> None:
    class Redirects(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", f"ftp://127.0.0.1:{other.getsockname()[1]}/x.tar")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with socket.create_server(("127.0.0.1", 0)) as other, HTTPServer(("127.0.0.1", 0), Redirects) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        other.settimeout(0.2)
        with pytest.raises(DataError, match=r"curl ended with exit code 1 \(a redirect leaves the web"):
            loaded(stream(f"http://127.0.0.1:{server.server_port}/x.tar"), 1)
        with pytest.raises(TimeoutError):
            other.accept()
        server.shutdown()
