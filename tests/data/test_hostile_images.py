"""Images made to run code or to exhaust memory or time."""

import io
import os
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.hostile_files import accepted, jpeg, streamed, write_tar
from helpers.hostile_pieces import PIECES
from helpers.tiny_images import encoded, write_tree
from vitpar.data import (
    EvalTransform,
    SampleOrder,
    ShardSet,
    TrainLoader,
    TrainTransform,
    index,
    pack,
    verify,
)
from vitpar.data import images as images_module
from vitpar.data.images import BadImage, decode
from vitpar.errors import DataError

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
EVAL = EvalTransform(8)


@pytest.fixture
def ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a fake `gs` first in PATH. It creates the returned file if it ever runs."""
    ran, program = tmp_path / "ran", tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {ran}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
    return ran


def test_ghostscript_never_runs(tmp_path: Path, ghostscript: Path) -> None:
    with pytest.raises(BadImage):
        decode(EPS)
    shards = tmp_path / "shards"
    shards.mkdir()
    path = write_tar(shards / "train-0.tar", ("a.jpg", EPS), ("a.cls", b"0"))
    index(shards)
    assert ["image format is unknown" in problem.what for problem in verify(shards)] == [True]
    train = ShardSet.open(shards, "train")
    with pytest.raises(DataError, match="image format is unknown"):
        next(iter(TrainLoader(train, TrainTransform(8), order=SampleOrder(0, 1), batch_size=1, workers=0)))
    with pytest.raises(DataError, match="image format is unknown"):
        streamed(path)
    write_tree(tmp_path / "source")
    (tmp_path / "source" / "train" / "ant" / "0.png").write_bytes(EPS)
    with pytest.raises(DataError, match="is not a supported image type"):
        pack(tmp_path / "source", tmp_path / "packed")
    assert not ghostscript.exists()


@pytest.mark.parametrize("kind", ["EPS", "PDF", "ICO", "PPM", "TGA", "PCX", "DDS", "SGI"])
def test_unsupported_formats_are_refused(kind: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, kind)
    with pytest.raises(BadImage, match="image format is unknown"):
        decode(file.getvalue())


def test_other_formats_in_disguise_are_refused(ghostscript: Path) -> None:
    for data in PIECES["disguise"]:
        with pytest.raises(BadImage, match="image format is unknown"):
            decode(data)
    assert not ghostscript.exists()


@pytest.mark.parametrize(("kind", "places"), [("jpeg", (2,)), ("png", (8, 33)), ("gif", (13,)), ("webp", (12, 30))])
def test_hostile_parts_of_images_are_decoded_or_refused(kind: str, places: tuple[int, ...]) -> None:
    data = encoded(0, kind.upper())
    for piece in PIECES[kind]:
        for place in places:
            accepted(decode, data[:place] + piece + data[place:])


def test_image_claiming_too_many_pixels_is_refused() -> None:
    data = jpeg(16, 16)
    place = data.index(b"\xff\xc0") + 5
    with pytest.raises(BadImage, match="60000 x 60000 pixels, more than 134,217,728"):
        decode(data[:place] + struct.pack(">HH", 60_000, 60_000) + data[place + 4 :])
    png = encoded(0)
    header = png[12:16] + struct.pack(">II", 8000, 8000) + png[24:29]
    with pytest.raises(BadImage, match="8000 x 8000 pixels, more than 44,739,242"):
        decode(png[:12] + header + struct.pack(">I", zlib.crc32(header)) + png[33:])


@pytest.mark.parametrize("fast", [True, False])
def test_large_jpeg_is_decoded_at_half_size(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fast:
        monkeypatch.setattr(images_module, "simplejpeg", None)
    whole = decode(jpeg(101, 61))
    monkeypatch.setattr(images_module, "MAX_DECODED_BYTES", 3 * 100 * 60)
    half = decode(jpeg(101, 61))
    assert whole.shape == (61, 101, 3) and half.shape == (31, 51, 3)
    assert np.abs(half[:, :50].astype(int) - whole[::2, :100:2]).max() <= 4


def test_long_thin_image_is_not_enlarged_without_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    thin = np.random.default_rng(0).integers(0, 256, (1, 65_000, 3), np.uint8)
    sizes: list[tuple[int, int]] = []
    module = sys.modules["vitpar.data.transforms.sample"]
    real = module.resize
    monkeypatch.setattr(module, "resize", lambda image, h, w, i: sizes.append((h, w)) or real(image, h, w, i))
    monkeypatch.setattr(module, "MAX_DECODED_BYTES", 3 * 9 * 576)
    EVAL(thin)
    EVAL(thin.transpose(1, 0, 2))
    EVAL(thin[:, :50])
    assert sizes == [(9, 576), (576, 9), (9, 450)]
