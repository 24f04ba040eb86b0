"""Shards of a stream, and the reader of one part of them."""

from __future__ import annotations

import hashlib
import itertools
import random
import threading
from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from vitpar.data.images import BadImage, BadSample
from vitpar.data.randomness import hash_numbers, sample_keys, shuffled
from vitpar.data.shards.index import EXTENSIONS, Labels, is_image, label_of
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.stream import urls
from vitpar.data.tar import content, members
from vitpar.errors import DataError
from vitpar.text import count, literal, shown

_BUFFER = 0x57E4  # separates the shuffle of the buffer from other hashes of seed and pass


class StreamPart(NamedTuple):
    """Part of a stream that one reader reads."""

    number: int
    """Number of the part, from 0."""
    parts: int
    """Number of parts."""


@dataclass(frozen=True)
class StreamSet:
    """Shards that are read sequentially, by URL.

    Raises DataError for a URL that cannot be read or is not allowed, and for labels that are names of folders.
    """

    shards: tuple[str, ...]
    """URLs of the shards."""
    samples: int
    """Number of images in all shards, as the user states it; counting them would mean reading all shards."""
    num_classes: int
    """Number of classes; labels are below it."""
    labels: Labels
    """Place of the labels in the shards."""
    shuffle_buffer: int = 1000
    """Number of samples in the buffer that shuffles them in training."""
    allow_pipe: bool = False
    """Whether URLs may run commands."""
    class_names: ClassVar[tuple[str, ...] | None] = None
    """Names of the classes: a stream has only numbers."""
    names_of_classes: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Lists of names by which the classes are known."""

    def __post_init__(self) -> None:
        urls.check(self.shards, self.allow_pipe)
        if self.labels.kind == "folder":
            raise DataError(
                "a stream has no list of classes, so stream.label cannot be 'folder': use cls or json:FIELD"
            )

    def __len__(self) -> int:
        return self.samples

    @property
    def fingerprint(self) -> str:
        """Stated size of the stream, in words. It does not depend on the content, which only reading could check."""
        return f"stream of {len(self.shards)} shards, {self.samples} images, {self.num_classes} classes"

    @property
    def place(self) -> str:
        """First and last shard, for messages."""
        first, last = shown(self.shards[0]), shown(self.shards[-1])
        return first if len(self.shards) == 1 else f"{first} … {last}"


ImageSet = ShardSet | StreamSet
"""Split of a data set, packed or streamed. Packed text is a `ShardSet` too."""


@dataclass(frozen=True)
class Sample:
    """Labelled image that was read from a stream."""

    image: bytes
    """Encoded image."""
    label: int
    """Class number."""
    key: int
    """Random key of the sample in this pass."""
    name: str
    """Key in its shard and URL of the shard, for messages."""


class Fetched(list[Sample]):
    """Samples of a batch, from which a loader reads them by number."""

    checked = False
    """Whether `read` compares the bytes with a checksum; tar files have no checksums of their data."""

    def read(self, i: int) -> bytes:
        """Return the encoded image of sample `i`."""
        return self[i].image

    def complaint(self, i: int, error: BadImage) -> str:
        """Return a message that names sample `i` and says what is wrong with it."""
        return f"{self[i].name}: {error}"


class Reader:
    """Reader of the shards of one part.

    bad_sample: treatment of a sample without image or label, and of a shard that cannot be read to its end. "fail"
        raises DataError; "skip" continues after it and appends a message to `skipped` or `broken`.
    stopping: event that ends reading.
    """

    def __init__(
        self, data: StreamSet, part: StreamPart, seed: int, *, bad_sample: BadSample, stopping: threading.Event
    ) -> None:
        self.data, self.part, self.seed, self.bad_sample, self.stopping = data, part, seed, bad_sample, stopping
        self.skipped: list[str] = []
        self.broken: list[str] = []

    def endless(self, first: int) -> Generator[Sample]:
        """Yield the samples of pass after pass, beginning with pass `first`.

        Raises DataError, also for a pass without samples.
        """
        from webdataset.filters import shuffle

        size, (part, parts) = self.data.shuffle_buffer, self.part
        for number in itertools.count(first):
            shards = self.pass_shards(number)
            draws = random.Random(int(hash_numbers(_BUFFER, self.seed, number, part)[0]))
            usable = 0
            with closing(self._samples(shards, number)) as samples:
                for sample in shuffle(size, initial=size, rng=draws)(samples):
                    usable += 1
                    yield sample
            if not usable:
                why = "; ".join((self.broken + self.skipped)[:3]) or "they are empty"
                raise DataError(
                    f"none of the {count(len(shards), 'shard')} that part {part} of {parts} read from "
                    f"'{self.data.place}' has a usable image ({why}): fix them"
                )

    def once(self) -> Generator[Sample]:
        """Return an iterator over every sample once, in stored order."""
        return self._samples(range(self.part.number, len(self.data.shards), self.part.parts), 0)

    def pass_shards(self, number: int) -> list[int]:
        """Return the numbers of the shards that this part reads in pass `number`, in order."""
        total = len(self.data.shards)
        return shuffled(np.arange(total), total, self.seed, number)[self.part.number :: self.part.parts].tolist()

    def _samples(self, shards: Iterable[int], number: int) -> Generator[Sample]:
        for shard in shards:
            yield from self._shard(shard, number)

    def _shard(self, shard: int, number: int) -> Generator[Sample]:
        from webdataset.tariterators import group_by_keys

        url = self.data.shards[shard]

        def readable(stream: urls.ShardStream) -> Generator[dict[str, Any]]:
            for member in members(stream):
                extension = member.name.rpartition("/")[2].partition(".")[2].lower()
                if member.isreg() and (is_image(extension) or self.data.labels.has(extension)):
                    yield {"fname": member.name, "data": content(stream, member), "__url__": url}
            stream.finish()  # before the last sample, which may be truncated, is yielded

        try:
            stream = urls.ShardStream(url, self.stopping)
        except (OSError, ValueError) as error:
            return self._bad(f"shard '{shown(url)}' cannot be opened: {urls.words(error)}", self.broken, "restore it")
        with closing(stream):
            try:
                for sample in group_by_keys(readable(stream)):
                    if (made := self._sample(sample, shard, number)) is not None:
                        yield made
            except (DataError, urls.Stopped):
                raise
            except Exception as error:  # tarfile and webdataset raise nearly anything for a truncated file
                why = stream.reason(error)
                self._bad(f"shard '{shown(url)}' cannot be read to its end: {why}", self.broken, "restore it")

    def _sample(self, fields: dict[str, Any], shard: int, number: int) -> Sample | None:
        url, key, extension = self.data.shards[shard], fields["__key__"], self.data.labels.extension
        name = f"sample '{shown(key)}' of '{shown(url)}'"
        images = [fields[kind] for kind in EXTENSIONS if kind in fields]
        images = images or [data for kind, data in fields.items() if is_image(kind)]
        label_data = next((data for kind, data in fields.items() if self.data.labels.has(kind)), None)
        if label_data is None or len(images) != 1:
            has = f"no label (.{extension})" if label_data is None else f"{len(images)} images"
            self._bad(f"{name} has {has}", self.skipped, "fix it")
            return None
        try:
            label = label_of(label_data, self.data.labels, where := f"'{shown(key)}.{extension}' of '{shown(url)}'")
            if isinstance(label, str):
                raise DataError(f"label {literal(label)} of {where} is a name, but a stream knows numbers only")
        except DataError as error:
            self._bad(str(error), self.skipped, "fix it")
            return None
        if label >= self.data.num_classes:
            raise DataError(
                f"label {label} of {name} is outside the {self.data.num_classes} classes of stream.classes: "
                f"raise it, or correct stream.label"
            )
        code = int.from_bytes(
            hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little", signed=True
        )
        random_key = sample_keys(self.seed, *(np.array([x], np.int64) for x in (number, shard, code)))
        return Sample(images[0], label, int(random_key[0]), name)

    def _bad(self, problem: str, counted: list[str], fix: str) -> None:
        if self.bad_sample == "fail":
            raise DataError(f"{problem}; {fix}, or set data.bad_sample to skip")
        counted.append(problem)
