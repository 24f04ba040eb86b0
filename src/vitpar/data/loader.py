"""Batches of one rank: the base class of all loaders, and the loaders of packed data sets.

A global batch is the same under every plan. Every rank has the labels and keys of the global batch, which come from the
index, but only the images of the rows that it requests. Ranks that need no pixels, such as the later stages of a
pipeline, request no rows and open no shard.

Samples are read, decoded and cropped in threads. Threads suffice because decoding and resizing release Python's global
interpreter lock. Every sample has its own row in the tensor of its batch and its own random numbers, so results do not
depend on which thread processes a sample, or when. What follows the crop is done for the complete batch: by the thread
that has made its last crop, or by the GPU that takes it.
"""

import itertools
from collections import deque
from collections.abc import Generator, Iterable, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from threading import Lock
from typing import Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitpar.data.batches import Batch, BatchJob, Encoded, Labelled, LoaderSettings, Skipped, Transform, View
from vitpar.data.cache import CachedSet
from vitpar.data.images import BadImage, EncodedImage, opened
from vitpar.data.randomness import Draws, SampleOrder, hash_numbers, sample_keys
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.transforms.drawn import DrawnBatch
from vitpar.data.transforms.sample import EvalTransform, TrainTransform
from vitpar.errors import DataError, RecipeError
from vitpar.models import IGNORED

_PREFETCH = 2  # batches in progress beyond the one that the consumer waits for
_TASK = 16  # rows of one thread-pool task: enough to amortise its overhead with tiny images, few enough to stop quickly
_DECODED_BYTES = 1 << 22  # decoded images that wait until the crops of several are drawn at once
_DRAWING_THREADS = 2  # most that draw for a GPU which has the images: its kernels are started under the same lock
_VIEW = 0x71E3  # separates the random numbers of further views from other hashes of the key


class Loader:
    """Base class of loaders, which turns the jobs that a subclass yields into batches.

    transform: transform of the images; several of them make as many crops of each image, with one size each. The first
        one draws by the key of a sample, and the others by numbers that follow from it.
    start: global samples seen before the first batch; every `iter()` begins there again.
    stored: images of `data` on the device that takes them, uint8 [images, 3, height, width], in place of decoding. A
        `TrainTransform` crops them. For an `EvalTransform` they are as it makes them, with one more for padding. The
        pixels of batches stay the same.

    The attribute `skipped` counts the bad samples and shards skipped so far.

    Raises DataError for a batch size below 1, and RecipeError for another invalid setting.
    """

    whole = True
    """Whether labels and keys of the batches cover the global batch."""

    def __init__(
        self,
        data: Sized,
        transform: Transform | Sequence[Transform],
        start: int = 0,
        stored: Tensor | None = None,
        **settings: Unpack[LoaderSettings],
    ) -> None:
        self.workers, self.bad_sample = settings.get("workers", 2), settings.get("bad_sample", "fail")
        if self.workers < 0:
            raise RecipeError(f"workers is {self.workers}: use 0 to decode in the main thread, or a positive number")
        if self.bad_sample not in ("fail", "skip"):
            raise RecipeError(f"bad_sample is '{self.bad_sample}': use fail or skip")
        self.batch_size, rows = settings["batch_size"], settings.get("rows")
        if self.batch_size < 1:
            raise DataError(f"the batch size is {self.batch_size}: use 1 or more")
        self.rows = np.arange(self.batch_size) if rows is None else np.asarray(rows, dtype=np.int64)
        inside = (self.rows >= 0) & (self.rows < self.batch_size)
        assert inside.all(), f"rows {rows} are not all within a batch of {self.batch_size}"
        self.start = start
        self.skipped = Skipped()
        self._cache: CachedSet | None = None
        self._size, self._device = len(data), settings.get("device", torch.device("cpu"))
        self._transforms = list(transform) if isinstance(transform, Sequence) else [transform]
        assert settings.get("sizes") is None or len(self._transforms) == 1, "several views have a size each"
        self._sizes, self._stored, self._counting = settings.get("sizes"), stored, Lock()
        self._decoder = settings.get("decoder")
        if stored is not None and stored.device.type != "cpu":
            self.workers, self._device = min(self.workers, _DRAWING_THREADS), stored.device

    def _jobs(self) -> Generator[BatchJob]:
        """Yield the batches to fill, in order."""
        raise NotImplementedError

    def __iter__(self) -> Generator[Batch]:
        with closing(self._jobs()) as jobs, closing(self._filled(self._with_views(jobs))) as filled:
            for number, job in enumerate(filled, start=1):
                samples = self.start + number * self.batch_size
                labels, keys, epoch = torch.from_numpy(job.labels), torch.from_numpy(job.keys), samples / self._size
                images, *further = [view.images for view in job.views] or [None]
                if self._decoder:
                    self._decoder.hand_over(images, *further)
                yield Batch(
                    images, labels, keys, epoch, samples, job.size, tuple(further), whole=self.whole, ended=job.ended
                )

    @property
    def _computes(self) -> bool:
        """Whether threads change pixels after the crop."""
        changes = self._stored is not None or any(transform.changes for transform in self._transforms)
        return changes and self._device.type == "cpu"

    def _with_views(self, jobs: Generator[BatchJob]) -> Generator[BatchJob]:
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
                    job.views.append(View(transform, Draws(own), self._allocated(transform.size)))
            yield job

    def _allocated(self, size: int) -> Tensor | None:
        """Return memory for the crops of this rank's rows."""
        if self._stored is not None:
            return None
        shape = len(self.rows), 3, size, size
        return torch.zeros(shape, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def _filled(self, jobs: Iterable[BatchJob]) -> Generator[BatchJob]:
        """Yield the jobs in order, with decoded images; skipped rows get label IGNORED.

        Closing the iterator ends the threads.
        """
        if not len(self.rows):
            yield from jobs
            return
        with closing(self._threaded(jobs) if self.workers else self._inline(jobs)) as filled:
            for job in filled:
                problems = tuple(job.skipped + job.broken)
                self.skipped += Skipped(len(job.skipped), problems, len(job.broken))
                yield job

    def _inline(self, jobs: Iterable[BatchJob]) -> Generator[BatchJob]:
        for job in jobs:
            self._work(job, 0, len(self.rows))
            yield job

    def _threaded(self, jobs: Iterable[BatchJob]) -> Generator[BatchJob]:
        waiting: deque[tuple[BatchJob, list[Future[None]]]] = deque()
        pool = ThreadPoolExecutor(self.workers, "vitpar-decode", initializer=_compute_alone if self._computes else None)
        try:
            for job in jobs:
                waiting.append((job, self._submit(pool, job)))
                if len(waiting) > _PREFETCH:
                    yield self._finished(*waiting.popleft())
            while waiting:
                yield self._finished(*waiting.popleft())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _finished(self, job: BatchJob, tasks: list[Future[None]]) -> BatchJob:
        for task in tasks:
            task.result()
        if self._computes:  # the threads have changed the default of threads that start later, besides their own number
            torch.set_num_threads(torch.get_num_threads())
        return job

    def _submit(self, pool: ThreadPoolExecutor, job: BatchJob) -> list[Future[None]]:
        rows = len(self.rows)
        task = rows if self._stored is not None else min(_TASK, -(-rows // self.workers))
        return [pool.submit(self._work, job, row, min(row + task, rows)) for row in range(0, rows, task)]

    def _work(self, job: BatchJob, start: int, stop: int) -> None:
        """Make the crops at places `start` to `stop` - 1 of this rank's rows, and with the last of them the batch."""
        if self._stored is None:
            self._fill(job, range(start, stop), on_host=self._decoder is None)
        with self._counting:
            job.missing -= stop - start
            last = not job.missing
        if last:
            self._complete(job)

    def _complete(self, job: BatchJob) -> None:
        """Decode what the device does, draw what follows the crops, and do it if no GPU will."""
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
            try:
                image = self._opened(job.source, sample)
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

    def _opened(self, source: Encoded, sample: int) -> EncodedImage | NDArray[np.uint8]:
        """Return an image whose header is read, or its pixels if they are cached or its shape is known only then.

        No transform writes to pixels, since they may be cached.
        """
        cached = self._cache.get(sample) if self._cache else None
        if cached is not None:
            return cached
        image = opened(source.read(sample))
        return image if image.shape else self._decoded(source, sample, image)

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


def _compute_alone() -> None:
    """Let the calling thread compute without helpers: teams of several threads would take the cores from each other."""
    torch.get_num_threads()  # otherwise the thread's first large operation sets the number again, to the program's
    torch.set_num_threads(1)


class TrainLoader(Loader):
    """Endless training batches of a packed data set.

    order: order of all samples of `shards`.
    start: global samples seen before the first batch.
    cache: decoded images of `shards`, which loaders share. It changes only the speed.
    stored: as for `Loader`.

    A skipped bad sample is IGNORED only on ranks that decode it; other ranks keep its label.
    """

    def __init__(
        self,
        shards: ShardSet,
        transform: TrainTransform | Sequence[TrainTransform],
        *,
        order: SampleOrder,
        start: int = 0,
        cache: CachedSet | None = None,
        stored: Tensor | None = None,
        **settings: Unpack[LoaderSettings],
    ) -> None:
        assert order.size == len(shards), f"an order of {order.size} samples for {len(shards)}"
        super().__init__(shards, transform, start, stored, **settings)
        self._shards, self._order, self._cache = shards, order, cache

    def _jobs(self) -> Generator[BatchJob]:
        checked = -1
        for start in itertools.count(self.start, self.batch_size):
            epochs, samples, repeats = self._order.batch(start, self.batch_size)
            if len(self.rows) and epochs[-1] > checked:
                self._shards.refuse_changed()
                checked = int(epochs[-1])
            keys = sample_keys(self._order.seed, epochs, samples, repeats)
            yield BatchJob(self._shards, samples, keys, self._shards.labels[samples].astype(np.int64))


class EvalLoader(Loader):
    """Every sample of a split once, in order, in `len()` batches of the same shape.

    The last batch is padded with label IGNORED. Every rank yields the same number of batches; the rows of a rank may
    be only padding.

    cache: decoded images of `images`, which loaders share. It changes only the speed.
    stored: as for `Loader`.
    """

    def __init__(
        self,
        images: Labelled,
        transform: EvalTransform,
        *,
        cache: CachedSet | None = None,
        stored: Tensor | None = None,
        **settings: Unpack[LoaderSettings],
    ) -> None:
        super().__init__(images, transform, stored=stored, **settings)
        self._images, self._cache = images, cache

    def __len__(self) -> int:
        return -(-len(self._images) // self.batch_size)

    def _jobs(self) -> Generator[BatchJob]:
        for step in range(len(self)):
            samples = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
            real = samples < len(self._images)
            labels = np.full(len(samples), IGNORED, dtype=np.int64)
            labels[real] = self._images.labels[samples[real]]
            yield BatchJob(self._images, np.where(real, samples, IGNORED), np.zeros_like(samples), labels)
