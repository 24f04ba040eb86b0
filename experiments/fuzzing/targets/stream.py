"""Targets: shards that are read sequentially, from files and from a web server."""

from __future__ import annotations

import importlib
import random
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzzing import oracle
from fuzzing.attacks import tars
from fuzzing.attacks.web import Answer, Server, answers
from fuzzing.guard import CANARY
from fuzzing.seeds import Members, samples, tar
from fuzzing.target import Case, Files, FileTarget, Target
from vitpar.data import EvalTransform, Labels, StreamEvalLoader, StreamLoader, StreamSet, TrainTransform

SIDE, CLASSES, MOST = 8, 3, 300
"""Image size, number of classes, and batches after which reading an endless stream stops."""
SILENT_S = 1.0
KINDS = ("cls", "json")


def hurry() -> None:
    """Shorten vitpar's timeout for a silent source to SILENT_S."""
    for module in ("vitpar.limits", "vitpar.data.stream.urls", "vitpar.data.stream"):
        loaded = importlib.import_module(module)
        for name in ("_SILENT_S", "SILENT_S", "MAX_SILENT_S"):
            if hasattr(loaded, name):
                setattr(loaded, name, SILENT_S)


@dataclass(frozen=True)
class Way:
    """Way of reading a stream."""

    skips: bool
    """Whether bad samples are skipped instead of ending the run."""
    workers: int
    """Decoding threads."""
    trains: bool
    """Whether to read four batches for training instead of one evaluation."""

    @classmethod
    def drawn(cls, draw: random.Random) -> Way:
        """Return a random way, mostly the simplest one."""
        return cls(draw.random() < 0.3, draw.choice((0, 0, 2)), draw.random() < 0.2)

    def labels(self, urls: tuple[str, ...], kind: str) -> tuple[list[int], int]:
        """Return the labels of the samples in order, and the number of skipped shards and samples."""
        data = StreamSet(urls, samples=6, num_classes=CLASSES, labels=Labels(kind), shuffle_buffer=4)
        settings: dict[str, Any] = {
            "batch_size": 4,
            "workers": self.workers,
            "bad_sample": "skip" if self.skips else "fail",
        }
        if self.trains:
            training = StreamLoader(data, TrainTransform(size=SIDE), seed=0, **settings)
            with closing(iter(training)) as batches:
                return [int(label) for _ in range(4) for label in next(batches).labels if label >= 0], 1
        loader = StreamEvalLoader(data, EvalTransform(SIDE), **settings)
        found: list[int] = []
        with closing(iter(loader)) as batches:
            for number, batch in enumerate(batches):
                if batch.ended or number > MOST:
                    break
                found += [int(label) for label in batch.labels if label >= 0]
        return found, loader.skipped.times + loader.skipped.shards


def told(labels: list[int]) -> None:
    """Raise `oracle.Wrong` if a label is outside the classes."""
    if any(label >= CLASSES for label in labels):
        raise oracle.Wrong("a label is outside the classes")


class LocalStream(FileTarget):
    """Shards in local files."""

    what = "shards in files, read as streams"
    tokens = (b"ustar\x0000", b".png", b".cls", b"0000", b"00000000644", b"../", b"\0" * 512)

    def __init__(self, home: Path) -> None:
        hurry()
        self._members: list[Members] = [samples(6, kind) for kind in KINDS]
        self.seeds = [{"0.tar": tar(members), "1.tar": tar(members[:4])} for members in self._members]
        self.attacks = (_hostile,)

    def read(self, case: Case) -> None:
        way = Way.drawn(random.Random(case.number))
        urls = tuple(str(case.place / name) for name in ("0.tar", "1.tar"))
        labels, passed = way.labels(urls, KINDS[case.seed])
        told(labels)
        right = [0, 1, 2, 0, 1, 2, 0, 1]
        if case.untouched and not way.trains and (labels, passed) != (right, 0):
            raise oracle.Wrong(f"the labels are {labels}, with {passed} passed over")
        cut = [name for name in case.changed if _is_cut(case.files[name], self.seeds[case.seed].get(name, b""))]
        if cut and not passed and len(labels) < len(right):
            raise oracle.Wrong(f"{cut[0]} is cut short, and nothing is said")


def _is_cut(content: Any, seed: bytes) -> bool:
    return isinstance(content, bytes) and len(content) < len(seed) - 1024 and seed.startswith(content)


def _hostile(draw: random.Random, files: Files) -> str:
    kind = "cls" if files["1.tar"] == tar(samples(6, "cls")[:4]) else "json"
    name = draw.choice(sorted(files))
    files[name], words = tars.attack(draw, samples(6, kind), kind)
    return f"{name}: {words}"


class HttpStream(Target):
    """Shards from a web server."""

    what = "shards from a web server that lies"
    programs = ("curl",)

    def __init__(self, home: Path) -> None:
        hurry()
        self._server = Server()
        self._shard = tar(samples(6))
        self._canary = home.parent / CANARY
        self._right = [0, 1, 2, 0, 1, 2]

    def make(self, draw: random.Random, number: int, place: Path) -> Case:
        shard, altered = self._shard, False
        if number and draw.random() < 0.15:
            shard, _ = tars.attack(draw, samples(6), "cls")
            altered = True
        answer, said = answers(draw, shard or b"x", self._canary)
        if number == 0:
            answer, said = Answer((b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(shard), shard)), "right"
        url = "http://127.0.0.1:{port}/shard.tar"
        if number and draw.random() < 0.05:
            url = draw.choice(URLS)
            altered, said = True, f"{said}, as {url}"
        how = f"{said}{', of a hostile shard' if altered else ''}"
        return Case(number, place, 0, {"shard": shard}, how=how, told=(url, answer, altered) if number else None)

    def read(self, case: Case) -> None:
        url, answer, altered = case.told or ("http://127.0.0.1:{port}/shard.tar", None, False)
        self._server.answer = answer or Answer((b"HTTP/1.1 200 OK\r\n\r\n", self._shard))
        way = Way.drawn(random.Random(case.number))
        labels, passed = way.labels((url.replace("{port}", str(self._server.port)),), "cls")
        told(labels)
        if not altered and not way.trains and self._server.answer.honest and not passed and labels != self._right:
            raise oracle.Wrong(f"the labels are {labels} instead of {self._right}, and nothing is said")

    def close(self) -> None:
        self._server.close()


URLS = (
    "http://127.0.0.1:{port}/[1-100000000].tar",
    "http://127.0.0.1:{port}/{a,b}.tar",
    "http://user:pass@127.0.0.1:{port}/x.tar",
    "http://127.0.0.1:99999/x.tar",
    "http://127.0.0.1:-1/x.tar",
    "http://127.0.0.1:1/x.tar",
    "http://[::1/x.tar",
    "http://127.0.0.1:{port}/\r\nX: y",
    "http://127.0.0.1:{port}/a b\x1b[31m.tar",
    "http://127.0.0.1:{port}/" + "x" * 100_000,
    "http:127.0.0.1",
    "http://",
    "http:///x",
    "http://\u2025/x",
    "https://127.0.0.1:{port}/x.tar",
    "http://127.0.0.1:{port}/\udc80.tar",
    "http://127.0.0.1:{port}/x.tar#\0",
)
