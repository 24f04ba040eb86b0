"""Sources of images to pack. `open_source` recognises the kind of source by the files at its path.

SRC/train/<class>/*.jpg, SRC/val/<class>/*.jpg    a folder for every class of every split
    the splits may also be called training, valid, validation, eval, dev or testing, in any case; Tiny ImageNet's
    val_annotations.txt is read
SRC/<class>/*.jpg                                 the same without splits: a fraction becomes `val`
SRC/train.zip, val.zip, train_map.txt, val_map.txt [, classes.txt]    zipped ImageNet, as used by Swin and Galvatron
SRC/ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar, ILSVRC2012_devkit_t12.tar.gz    ImageNet as published
SRC/train-00000-of-00002.parquet, …               Hugging Face's image data sets, in SRC or SRC/data
cifar-10-python.tar.gz, cifar-100-binary.tar.gz, … or the folders they unpack to
LIST.csv                                          columns path, label and optionally split
digits                                            1,797 handwritten digits of 8×8 pixels that scikit-learn ships
"""

from pathlib import Path

from vitpar.data.sources.arrays import DIGITS, cifar, cifar_files, digits
from vitpar.data.sources.files import class_folders, listed, split_folders, zipped
from vitpar.data.sources.imagenet import imagenet, is_imagenet
from vitpar.data.sources.parquet import parquet, parquet_files
from vitpar.data.sources.source import Progress, Source, SourceSplit, carve_val
from vitpar.errors import DataError
from vitpar.text import shown

__all__ = ["Progress", "Source", "SourceSplit", "open_source"]

VAL_FRACTION = 0.2
"""Default fraction of every class that becomes `val` if a source has no such split."""
_KINDS = (
    "use a folder with images, ImageNet's archives, train.zip or Parquet files, a CIFAR archive, a CSV list, or "
    f"`{DIGITS}`"
)


def open_source(
    location: str | Path, *, val_fraction: float | None = None, seed: int = 0, progress: Progress | None = None
) -> Source:
    """Open the source at `location`, of one of the kinds above.

    val_fraction: fraction of every class that becomes `val` if the source has no such split; 0 for no `val` split;
        VAL_FRACTION if None.
    seed: seed of the choice of images for `val`.
    progress: called while finding the images, where that takes long.

    Raises DataError if there is no such source, if it is damaged, or if it already has the `val` split that
    `val_fraction` requests.
    """
    if val_fraction is not None and not 0 <= val_fraction < 1:
        raise DataError(
            f"val fraction {val_fraction} is out of range: choose a number from 0 (no val) to below 1, such as 0.2"
        )
    try:
        source = _source(location, progress)
    except OSError as error:
        raise DataError(f"cannot read '{shown(error.filename or location)}': {error.strerror}") from None
    if "train" not in source.splits:
        raise DataError(f"'{location}' has {', '.join(source.splits)} but no training split: add files named train")
    if "val" not in source.splits and val_fraction == 0:
        return source
    if "val" not in source.splits:
        return carve_val(source, VAL_FRACTION if val_fraction is None else val_fraction, seed)
    if val_fraction is not None:
        raise DataError(f"'{location}' already has a val split: remove the val fraction {val_fraction}")
    return source


def _source(location: str | Path, progress: Progress | None) -> Source:
    path = Path(location)
    if str(location) == DIGITS:
        return digits()
    if path.is_file():
        if path.suffix.lower() == ".csv":
            return listed(path)
        files = cifar_files(path)
        if files is None:
            raise DataError(f"'{location}' is neither a CSV list nor a CIFAR archive: {_KINDS}; text needs --tokens")
        return cifar(files)
    if not path.is_dir():
        raise DataError(f"no folder or file '{location}' to pack: {_KINDS}")
    if is_imagenet(path):
        return imagenet(path, progress)
    if (path / "train.zip").exists() or (path / "train_map.txt").exists():
        return zipped(path)
    if files := cifar_files(path):
        return cifar(files)
    if parquet_files(path):
        return parquet(path)
    return class_folders(path, split_folders(path))
