"""Targets: shards that are read sequentially, from files and from a web server that lies."""

import gzip
import re
import socket
import socketserver
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fuzzing import oracle
from fuzzing.case import Case, Target
from fuzzing.edits import Draw, edited, pick
from fuzzing.guard import CANARY
from fuzzing.hostile import WORDS, gzip_zeros
from fuzzing.readers.shards import Tar, samples
from helpers.hostile_files import tar_member
from vitpar.data import EvalTransform, Labels, StreamEvalLoader, StreamLoader, StreamSet, TrainTransform
from vitpar.data.stream import urls

USUAL = "http://{host}/x"
CLASSES, MOST = 3, 300
"""Number of classes, and batches after which reading an endless stream stops."""
RIGHT = [0, 1, 2, 0, 1, 2]
"""Labels of the samples."""
Way = tuple[bool, int, bool]
"""Whether bad samples are skipped, decoding threads, and whether to read four batches for training."""
WAYS = st.tuples(st.booleans(), st.sampled_from((0, 2)), st.sampled_from((False, False, False, True)))
Answer = Sequence[bytes | str]
"""Bytes to send, and words: `pause`, `hang`, `reset`, and `forever`, which repeats what comes after it."""


def labels_of(way: Way | None, shards: tuple[str, ...], kind: str) -> tuple[list[int], int]:
    """Return the labels of a stream's samples in order, and the number of skipped shards and samples."""
    urls._SILENT_S = 1.0  # a server may be silent for longer than a case may take
    skips, workers, trains = way or (False, 0, False)
    data = StreamSet(shards, samples=6, num_classes=CLASSES, labels=Labels(kind), shuffle_buffer=4)
    settings: dict[str, Any] = {"batch_size": 4, "workers": workers, "bad_sample": "skip" if skips else "fail"}
    found, skipped = list[int](), 1
    if trains:
        with closing(iter(StreamLoader(data, TrainTransform(size=8), seed=0, **settings))) as training:
            found = [int(label) for _ in range(4) for label in next(training).labels if label >= 0]
    else:
        loader = StreamEvalLoader(data, EvalTransform(8), **settings)
        with closing(iter(loader)) as batches:
            for number, batch in enumerate(batches):
                if batch.ended or number > MOST:
                    break
                found += [int(label) for label in batch.labels if label >= 0]
        skipped = loader.skipped.times + loader.skipped.shards
    if any(label >= CLASSES for label in found):
        raise oracle.Wrong("a label is outside the classes")
    return found, skipped


class Stream(Tar):
    """Shards in files, read as streams."""

    kinds = ("cls", "json")
    argument = WAYS

    def read(self, case: Case, place: Path) -> None:
        shards = str(place / "train-0.tar"), str(place / "val-0.tar")
        labels, skipped = labels_of(case.argument, shards, self.kinds[case.seed])
        if case.is_seed and (labels, skipped) != ([*RIGHT, 0, 1], 0):
            raise oracle.Wrong(f"the labels are {labels}, and {skipped} were skipped")
        for name in case.changed if not case.odd else ():
            cut = self.seeds[case.seed][name][:-1024].startswith(case.files[name])
            if cut and not skipped and len(labels) < len(RIGHT) + 2:
                raise oracle.Wrong("a shard is cut short, and nothing is said")


class Server(socketserver.ThreadingTCPServer):
    """Web server on this machine that sends `answer` to every request."""

    daemon_threads = allow_reuse_address = True
    answer: Answer = ()

    def finish_request(self, request: Any, address: Any) -> None:
        asked, answer = b"", self.answer
        request.settimeout(5)
        while b"\r\n\r\n" not in asked:
            if not (data := request.recv(4096)):
                return
            asked += data
        for number, step in enumerate(answer, 1):
            while step == "forever":
                request.sendall(b"".join(answer[number:]))
            if isinstance(step, bytes):
                request.sendall(step)
            elif step == "reset":
                request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            else:
                time.sleep(60 if step == "hang" else 0.2)

    def handle_error(self, request: Any, address: Any) -> None:
        """Ignore that the client has closed the connection."""


class Http(Target):
    """Shards from a web server that lies, and odd URLs."""

    programs = ("curl",)

    def make(self, home: Path) -> None:
        self.server = Server(("127.0.0.1", 0), socketserver.BaseRequestHandler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.host = f"127.0.0.1:{self.server.server_address[1]}"
        self.shard = samples(6)
        huge = {"large image": ("0.png", b"0"), "long name": ("x", b"L"), "large file": ("x.txt", b"0")}
        self.known = {name: tar_member(file, b"", kind, 1 << 40) for name, (file, kind) in huge.items()}
        canary = str(home.parent / "run" / CANARY).encode()
        self.known |= {"bomb": gzip_zeros(), "zeros": bytes(1 << 16), "canary": canary}
        right = WORDS["http"]["answers"][0]
        self.triggers = [self.asked(answer) for answer in WORDS["http"]["answers"]]
        self.triggers += [self.asked(right, url=url) for url in (*WORDS["http"]["urls"], "http://{host}/\udc80.tar")]

    def asked(self, text: str, way: Way | None = None, shard: bytes = b"", cut: int = 700, url: str = USUAL) -> Case:
        """Return the case of an answer in the words of the dictionary.

        shard: empty for the right one. cut: place between its halves.
        """
        whole = shard or self.shard
        known = self.known | {"shard": whole, "begin": whole[:cut], "rest": whole[cut:], "n": b"%d" % len(whole)}
        known |= {"hex": b"%x" % len(whole), "gzip": gzip.compress(whole, mtime=0), "samples": whole[:-1024] * 20}
        head, bar, body = text.removeprefix("? ").partition(" || ")
        if bar:
            head = "\r\n".join(["HTTP/1.1 " + head.replace(" | ", "\r\n"), "Connection: close", "", body])
        words = re.split(r"\{([a-z ]+)\}", head)
        answer = [known.get(word, word) if n % 2 else word.encode("latin-1") for n, word in enumerate(words)]
        return Case({}, argument=(answer, not shard and text[:1] != "?", way, url.replace("{host}", self.host)))

    def drawn(self, draw: Draw) -> Case:
        shard = edited(draw, self.shard)[0] if pick(draw, (False, False, False, True)) else b""
        cut = draw(st.integers(0, len(self.shard) - 1))
        return self.asked(pick(draw, WORDS["http"]["answers"]), draw(WAYS), shard, cut)

    def prepare(self, case: Case) -> None:
        self.server.answer = case.argument[0]

    def read(self, case: Case, place: Path) -> None:
        _, honest, way, url = case.argument
        labels, skipped = labels_of(way, (url,), "cls")
        if honest and not skipped and labels != RIGHT:
            raise oracle.Wrong(f"the labels are {labels} instead of {RIGHT}, and nothing is said")
