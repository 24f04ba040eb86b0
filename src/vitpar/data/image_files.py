"""Image files that are named one by one, without labels, as a source of evaluation batches."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitpar.data.images import FILE_SUFFIXES, BadImage
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.sources.files import image_files
from vitpar.errors import DataError
from vitpar.io import read_bytes
from vitpar.text import shown


def expand_images(paths: Iterable[Path]) -> list[str]:
    """Return the image files that `paths` name: a folder stands for all images in it and in its subfolders, sorted.

    Raises DataError for a path that does not exist, and for a folder without images.
    """
    files: list[str] = []
    for path in paths:
        if path.is_dir():
            inside = image_files(path)
            if not inside:
                raise DataError(f"'{shown(path)}' holds no images ({', '.join(FILE_SUFFIXES)}): name another folder")
            files += inside
        elif path.exists():
            files.append(str(path))
        else:
            raise DataError(f"there is no image '{shown(path)}': name image files, or folders of them")
    return files


class ImageFiles:
    """Image files by number, read only when they are needed. paths: paths of the files."""

    checked = True
    """Whether a damaged image is noticed only if it cannot be decoded, as for packed images, which evaluation reads."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = tuple(paths)
        self.labels: NDArray[np.int32] = np.zeros(len(paths), dtype=np.int32)

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def place(self) -> str:
        """First and last file, for messages."""
        return shown(self.paths[0]) if len(self) == 1 else f"{shown(self.paths[0])} … {shown(self.paths[-1])}"

    def name(self, i: int) -> str:
        """Return the path of image `i`."""
        return self.paths[i]

    def read(self, i: int) -> bytes:
        """Return the encoded image `i`. Raises BadImage for a file that cannot be read."""
        try:
            return read_bytes(self.paths[i])
        except OSError as error:
            raise BadImage(f"it cannot be read ({error.strerror})") from None

    def complaint(self, i: int, error: BadImage) -> str:
        """Return a message that names image `i` and says what is wrong with it."""
        return f"'{shown(self.paths[i])}': {error}"


class NotedImages:
    """Images of another source, with a note on each that was found to be bad.

    images: the other source.
    numbers: numbers in it of the images to have, in order; None for all.

    The attribute `problems` has the messages so far, by number of the image.
    """

    def __init__(self, images: ShardSet | ImageFiles, numbers: Sequence[int] | None = None) -> None:
        self._images, self._numbers = images, range(len(images)) if numbers is None else numbers
        self.labels = images.labels if numbers is None else images.labels[list(numbers)]
        self.checked, self.place = images.checked, images.place
        self.problems: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self, i: int) -> bytes:
        """Return the encoded image `i`."""
        return self._images.read(self._numbers[i])

    def name(self, i: int) -> str:
        """Return the path of image `i`, or its shard and key."""
        return self._images.name(self._numbers[i])

    def complaint(self, i: int, error: BadImage) -> str:
        """Return the source's message on image `i`, and note it."""
        self.problems[i] = self._images.complaint(self._numbers[i], error)
        return self.problems[i]
