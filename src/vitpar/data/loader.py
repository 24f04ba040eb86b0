"""Batches of one rank: the base class of all loaders of images, and the loaders of packed data sets.

A global batch is the same under every plan. Every rank has the labels and keys of the global batch, which come from the
index, but only the images of the rows that it requests. Ranks that need no pixels, such as the later stages of a
pipeline, request no rows and open no shard.

Samples are read, decoded and cropped in threads. Threads suffice because decoding and resizing release Python's global
interpreter lock. Every sample has its own row in the tensor of its batch and its own random numbers, so results do not
depend on which thread processes a sample, or when. What follows the crop is done for the complete batch: by the thread
that has made its last crop, or by the GPU that takes it.
"""

from collections.abc import Callable, Generator, Iterable, Sequence, Sized
from contextlib import closing
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Required, TypedDict, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitpar.data.batches import Batch, BatchJob, Encoded, Skipped, Transform, View, places_in_turn, shuffled_places
from vitpar.data.cache import CachedSet
from vitpar.data.device_decoding import DeviceDecoder
from vitpar.data.image_files import NotedImages
from vitpar.data.images import BadImage, BadSample, EncodedImage, opened
from vitpar.data.randomness import Draws, SampleOrder, hash_numbers
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.transforms.drawn import DrawnBatch
from vitpar.data.transforms.sample import EvalTransform, TrainTransform
from vitpar.errors import DataError
from vitpar.models import IGNORED
from vitpar.threads import compute_alone, in_threads

_TASK = 16  # rows of one thread-pool task: enough to amortise its overhead with tiny images, few enough to stop quickly
_DECODED_BYTES = 1 << 22  # decoded images that wait until the crops of several are drawn at once
_DRAWING_THREADS = 2  # most that draw for a GPU which has the images: its kernels are started under the same lock
_VIEW = 0x71E3  # separates the random numbers of further views from other hashes of the key


class KeptImages(TypedDict, total=False):
    """Images of packed data that are in memory. They affect only the speed."""

    cache: CachedSet | None
    """Decoded images, which loaders share. Default: none."""
    stored: Tensor | None
    """Images on the device that takes them, uint8 [images, 3, height, width], in place of decoding.

    A `TrainTransform` crops them. For an `EvalTransform` they are as it makes them, with one more for padding. The
    pixels of batches stay the same. Default: none.
    """


class LoaderSettings(KeptImages, total=False):
    """Settings of every loader."""

    batch_size: Required[int]
    """Images in the global batch."""
    rows: Sequence[int] | None
    """Rows of the global batch whose images to decode, in this order. Default: all."""
    workers: int
    """Number of decoding threads; 0 decodes in the calling thread. Affects only the speed. Default: 2."""
    bad_sample: BadSample
    """Treatment of an image that cannot be decoded. Default: "fail".

    "fail" raises DataError; "skip" gives its row label IGNORED and counts it in `skipped`. Only ranks that
    decode a sample know that it is bad; others keep its label.
    """
    device: torch.device
    """Device that takes the images. For a GPU they are in pinned memory, and it does what follows the crop.

    Default: the CPU.
    """
    decoder: DeviceDecoder | None
    """Decoder of JPEGs on the device, for a `TrainTransform`. Default: none; the decoding threads decode all images."""
    sizes: Callable[[int], int] | None
    """Function from the samples before a batch to the side of its images, in pixels. Default: that of the transform."""


class Loader:
    """Base class of loaders, which turns the jobs that a subclass yields into batches.

    transform: transform of the images; several of them make as many crops of each image, with one size each. The first
        one draws by the key of a sample, and the others by numbers that follow from it.
    start: global samples seen before the first batch; every `iter()` begins there again.

    The attribute `skipped` counts the bad samples and shards skipped so far.
    """

    whole = True
    """Whether labels and keys of the batches cover the global batch."""

    def __init__(
        self,
        data: Sized,
        transform: Transform | Sequence[Transform],
        start: int = 0,
        **settings: Unpack[LoaderSettings],
    ) -> None:
        self.batch_size, rows = settings["batch_size"], settings.get("rows")
        self.workers, self.bad_sample = settings.get("workers", 2), settings.get("bad_sample", "fail")
        self.rows = np.arange(self.batch_size) if rows is None else np.asarray(rows, dtype=np.int64)
        assert ((self.rows >= 0) & (self.rows < self.batch_size)).all(), f"rows {rows} are not all within a batch"
        self.start, self.skipped = start, Skipped()
        self._size, self._device = len(data), settings.get("device", torch.device("cpu"))
        self._transforms = list(transform) if isinstance(transform, Sequence) else [transform]
        self._sizes, self._decoder = settings.get("sizes"), settings.get("decoder")
        assert self._sizes is None or len(self._transforms) == 1, "several views have a size each"
        self._cache, self._stored, self._counting = settings.get("cache"), settings.get("stored"), Lock()
        if self._stored is not None and self._stored.device.type != "cpu":
            self.workers, self._device = min(self.workers, _DRAWING_THREADS), self._stored.device

    def _jobs(self) -> Generator[BatchJob]:
        """Yield the batches to fill, in order."""
        raise NotImplementedError

    def __iter__(self) -> Generator[Batch]:
        changes = self._stored is not None or any(transform.changes for transform in self._transforms)
        computes = changes and self._device.type == "cpu"  # whether threads change pixels after the crop
        with (
            closing(self._jobs()) as jobs,
            closing(self._with_views(jobs)) as given,
            closing(in_threads(given, self._tasks, self.workers, compute_alone if computes else None)) as filled,
        ):
            for number, job in enumerate(filled, start=1):
                # Threads have changed the default of threads that start later, besides their own number.
                if computes and self.workers:
                    torch.set_num_threads(torch.get_num_threads())
                self.skipped += Skipped(len(job.skipped), tuple(job.skipped + job.broken), len(job.broken))
                samples = self.start + number * self.batch_size
                labels, keys, epoch = torch.from_numpy(job.labels), torch.from_numpy(job.keys), samples / self._size
                images, *further = [view.images for view in job.views] or [None]
                if self._decoder:
                    self._decoder.hand_over(images, *further)
                yield Batch(images, labels, keys, epoch, samples, job.size, tuple(further), self.whole, job.ended)

    def _with_views(self, jobs: Iterable[BatchJob]) -> Generator[BatchJob]:
        """Yield the jobs with the views that are to be made."""
        for number, job in enumerate(jobs):
            if self._sizes:
                size = self._sizes(self.start + number * self.batch_size)
                self._transforms = [replace(transform, size=size) for transform in self._transforms]
            job.size, job.missing = self._transforms[0].size, len(self.rows)
            if job.missing:
                keys = job.keys[self.rows]
                for place, transform in enumerate(self._transforms):
                    own = (hash_numbers(_VIEW, keys, place) >> np.uint64(1)).view(np.int64) if place else keys
                    crops = None
                    if self._stored is None:
                        shape = len(self.rows), 3, transform.size, transform.size
                        crops = torch.zeros(shape, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
                    job.views.append(View(transform, Draws(own), crops))
            yield job

    def _tasks(self, job: BatchJob) -> list[Callable[[], None]]:
        """Return the tasks of threads that fill a batch with decoded images. Skipped rows get label IGNORED."""
        rows = len(self.rows)
        alone = self._stored is not None or not self.workers
        task = max(1, rows if alone else min(_TASK, -(-rows // self.workers)))
        return [partial(self._work, job, row, min(row + task, rows)) for row in range(0, rows, task)]

    def _work(self, job: BatchJob, start: int, stop: int) -> None:
        """Make the crops at places `start` to `stop` - 1 of this rank's rows, and with the last of them the batch.

        Decode then what the device does, draw what follows the crops, and do it if no GPU will.
        """
        if self._stored is None:
            self._fill(job, range(start, stop), on_host=self._decoder is None)
        with self._counting:
            job.missing -= stop - start
            if job.missing:
                return
        if self._decoder and job.encoded:
            made, failed = self._decoder.crops(job.encoded, job.views)
            self._fill(job, failed, on_host=True)
            for view, parts in zip(job.views, made, strict=True):
                assert isinstance(view.images, Tensor)
                view.images = self._decoder.joined(view.images, parts)
        for view in job.views:
            images, work = view.images, []
            if self._stored is not None:
                samples = job.samples[self.rows] % len(self._stored)
                images, work = self._stored, view.transform.stored(samples, view.draws, *self._stored.shape[2:])
            work += view.transform.work(view.draws)
            if work:
                assert isinstance(images, Tensor)
                drawn = DrawnBatch(images, work, view.transform)
                view.images = drawn.made() if self._device.type == "cpu" else drawn

    def _fill(self, job: BatchJob, places: Iterable[int], *, on_host: bool) -> None:
        """Decode and crop images, by their places among this rank's rows.

        on_host: also those that the device could decode, which are else only read.
        """
        ready, held = dict[int, EncodedImage | NDArray[np.uint8]](), 0
        for place in places:
            sample = int(job.samples[self.rows[place]])
            if sample == IGNORED:
                continue
            # No transform writes to pixels, since they may be cached.
            image: EncodedImage | NDArray[np.uint8] | None = self._cache.get(sample) if self._cache else None
            try:
                if image is None:
                    image = opened(job.source.read(sample))
                    if not image.shape:  # known only when it is decoded
                        image = self._decoded(job.source, sample, image)
            except BadImage as error:
                self._leave_out(job, place, error)
                continue
            if isinstance(image, EncodedImage) and image.for_gpu and not on_host:
                job.encoded[place] = image
                continue
            ready[place] = image
            held += image.nbytes if isinstance(image, np.ndarray) else 0
            if held > _DECODED_BYTES:
                self._crop(job, ready)
                ready, held = {}, 0
        if ready:
            self._crop(job, ready)

    def _decoded(self, source: Encoded, sample: int, image: EncodedImage) -> NDArray[np.uint8]:
        pixels = image.decoded(strict=not source.checked)
        if self._cache:
            self._cache.put(sample, pixels)
        return pixels

    def _crop(self, job: BatchJob, images: dict[int, EncodedImage | NDArray[np.uint8]]) -> None:
        """Make the crops of images, each as soon as it is decoded."""
        shapes, places = np.array([(image.shape or ())[:2] for image in images.values()]), np.array([*images])
        boxes = [view.transform.boxes(view.draws.of(places), shapes) for view in job.views]
        for (place, image), *own in zip(images.items(), *boxes, strict=True):
            if isinstance(image, EncodedImage):
                try:
                    shape, image = image.shape, self._decoded(job.source, int(job.samples[self.rows[place]]), image)
                    if image.shape[:2] != shape:
                        raise BadImage("it has another size than its header says")
                except BadImage as error:
                    self._leave_out(job, place, error)
                    continue
            for view, box in zip(job.views, own, strict=True):
                assert isinstance(view.images, Tensor)
                view.images.numpy()[place] = view.transform.crop(image, box)

    def _leave_out(self, job: BatchJob, place: int, error: BadImage) -> None:
        """Note a bad sample. Raises DataError if it is not to be skipped."""
        row = self.rows[place]
        problem = job.source.complaint(int(job.samples[row]), error)
        if self.bad_sample == "fail":
            raise DataError(f"{problem}; replace it, or set data.bad_sample to skip") from error
        job.labels[row] = IGNORED
        job.skipped.append(problem)


class TrainLoader(Loader):
    """Endless training batches of a packed data set. order: order of all samples of `shards`."""

    def __init__(
        self,
        shards: ShardSet,
        transform: TrainTransform | Sequence[TrainTransform],
        *,
        order: SampleOrder,
        start: int = 0,
        **settings: Unpack[LoaderSettings],
    ) -> None:
        super().__init__(shards, transform, start, **settings)
        self._shards, self._order = shards, order

    def _jobs(self) -> Generator[BatchJob]:
        shards, reads = self._shards, bool(len(self.rows))
        for samples, keys in shuffled_places(shards, self._order, self.start, self.batch_size, reads=reads):
            yield BatchJob(shards, samples, keys, shards.labels[samples].astype(np.int64))


class EvalLoader(Loader):
    """Every sample of a split once, in order, in `len()` batches of the same shape.

    The last batch is padded with label IGNORED. Every rank yields the same number of batches; the rows of a rank may
    be only padding.
    """

    def __init__(
        self, images: ShardSet | NotedImages, transform: EvalTransform, **settings: Unpack[LoaderSettings]
    ) -> None:
        super().__init__(images, transform, **settings)
        self._images = images

    def __len__(self) -> int:
        return -(-self._size // self.batch_size)

    def _jobs(self) -> Generator[BatchJob]:
        for samples in places_in_turn(self._size, self.batch_size):
            labels = np.where(samples == IGNORED, IGNORED, self._images.labels[samples]).astype(np.int64)
            yield BatchJob(self._images, samples, np.zeros_like(samples), labels)
