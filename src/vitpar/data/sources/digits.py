"""1,797 handwritten digits of 8×8 pixels that scikit-learn ships."""

import io

import numpy as np
from PIL import Image

from vitpar.data.sources.source import Source, SourceSplit
from vitpar.errors import DataError

DIGITS = "digits"


def digits() -> Source:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError(f"the `{DIGITS}` data set needs scikit-learn: pip install 'vitpar[digits]'") from None
    data = load_digits()

    def read(i: int) -> bytes:
        file = io.BytesIO()
        Image.fromarray(np.rint(data.images[i] * (255 / 16)).astype(np.uint8)).save(file, "PNG")  # 0..16 -> 0..255
        return file.getvalue()

    names = [f"{DIGITS}/{i}" for i in range(len(data.target))]
    return Source(
        [str(name) for name in data.target_names], {"train": SourceSplit(names, data.target.astype(np.int32), read)}
    )
