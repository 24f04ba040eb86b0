"""Decoding, cropping and resizing: correct pixels and ranges, and randomness fixed by the sample key."""

import io
import itertools

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image, ImageOps

from helpers.tiny_images import encoded, saved
from vitpar.data.images import BadImage, decode, image_size, image_type
from vitpar.data.randomness import Draws, sample_keys
from vitpar.data.shards.pack import Reencode
from vitpar.data.transforms.batch import Normalize
from vitpar.data.transforms.sample import TrainTransform
from vitpar.errors import RecipeError


def smooth(height, width):
    """Return a smooth uint8 image [height, width, 3], which resizing changes little."""
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([255 * y / height, 255 * x / width, 127 + 0 * x], axis=2).astype(np.uint8)


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "1", "LA"])
def test_every_png_mode_becomes_rgb(mode):
    image = Image.fromarray(smooth(9, 7)).convert(mode)
    assert np.array_equal(decode(saved(image, "PNG")), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_every_jpeg_mode_becomes_rgb(mode):
    data = saved(Image.fromarray(smooth(32, 24)).convert(mode), "JPEG", quality=95)
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(image.convert("RGB")).astype(int)
    assert np.abs(decode(data).astype(int) - expected).max() <= 2


def test_sixteen_bit_grey_is_scaled_not_clipped():
    grey = (np.arange(64, dtype=np.uint16) * 1000).reshape(8, 8)
    assert np.array_equal(decode(saved(Image.fromarray(grey), "PNG"))[:, :, 0], grey >> 8)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP"])
def test_image_type_and_size_are_read_from_the_bytes(kind):
    data = encoded(0, kind, size=(11, 5))
    assert image_type(data) == {"JPEG": "jpg", "TIFF": "tif"}.get(kind, kind.lower())
    assert image_size(data) == (11, 5) and decode(data).shape == (5, 11, 3)


@pytest.mark.parametrize("data", [encoded(0, "JPEG")[:-40], encoded(0, "PNG")[:-40], b"\xff\xd8\xff", b"", b"hello"])
def test_damaged_bytes_raise_bad_image(data):
    with pytest.raises(BadImage):
        decode(data)


def test_harmless_jpeg_flaws_are_accepted():
    data = encoded(0, "JPEG")
    flawed = data[:-2] + b"\0\0\0" + data[-2:]
    with pytest.raises(ValueError, match="extraneous bytes"):
        simplejpeg.decode_jpeg(flawed, strict=True)
    assert np.array_equal(decode(flawed), decode(data))


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(kind, orientation):
    """Images and their reencoded copies are rotated as Pillow rotates them."""
    (exif := Image.Exif())[0x0112] = orientation
    data = saved(smooth(60, 40), kind, exif=exif, **({"quality": 100, "subsampling": 0} if kind == "JPEG" else {}))
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")).astype(int)
    found = decode(data)
    assert found.shape == expected.shape and np.abs(found - expected).max() <= 2
    small = decode(Reencode(20, quality=100)(data))
    assert small.shape == ((30, 20, 3) if orientation < 5 else (20, 30, 3))
    resized = np.asarray(Image.fromarray(expected.astype(np.uint8)).resize(small.shape[1::-1])).astype(int)
    assert np.abs(small - resized).mean() < 4


def test_image_with_damaged_exif_is_decoded():
    assert decode(saved(smooth(20, 10), "JPEG", exif=b"Exif\0\0rubbish that is no TIFF")).shape == (20, 10, 3)


def test_pillow_decodes_jpegs_without_simplejpeg(monkeypatch):
    pixels = decode(encoded(0, "JPEG")).astype(int)
    monkeypatch.setattr("vitpar.data.images.simplejpeg", None)
    assert np.abs(decode(encoded(0, "JPEG")).astype(int) - pixels).max() <= 2
    with pytest.raises(BadImage):
        decode(encoded(0, "JPEG")[:-40])


def test_flip_can_be_switched_off_and_forced():
    image = smooth(16, 16)
    expected = torch.from_numpy(image).permute(2, 0, 1)
    for flip, pixels in ((0, expected), (1, expected.flip(-1))):
        found = TrainTransform(16, scale=(1, 1), ratio=(1, 1), flip=flip)([image] * 20, np.arange(20))
        assert torch.equal(found, pixels.expand_as(found))


def test_keys_depend_on_every_part_and_are_not_negative():
    n = 1000
    zeros, numbers = np.zeros(n, int), np.arange(n)
    cases = itertools.product((0, 1, -1), (0, 1), (0, 1))
    keys = np.concatenate([sample_keys(seed, zeros + e, numbers, zeros + r) for seed, e, r in cases])
    assert len(set(keys.tolist())) == 12 * n and keys.min() >= 0
    assert abs(np.mean(keys / 2**63) - 0.5) < 0.02


def test_draws_are_uniform_and_do_not_repeat_the_key_stream():
    draws = Draws(np.array([7]))
    numbers = np.concatenate([draws.uniform() for _ in range(4000)])
    assert abs(numbers.mean() - 0.5) < 0.02 and abs(numbers.std() - 12**-0.5) < 0.02 and len(set(numbers)) == 4000
    assert set(Draws(np.arange(50)).below(3).tolist()) == {0, 1, 2}
    # Drawing for some samples, chosen in two steps, draws from their streams alone.
    draws, part = Draws(np.arange(5)), Draws(np.array([4, 1]))
    assert np.array_equal(draws.of(np.array([4, 0, 1])).of(np.array([0, 2])).uniform(), part.uniform())
    expected = [*part.uniform()[::-1], *Draws(np.array([0])).uniform()]
    assert draws.uniform()[[1, 4, 0]].tolist() == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrainTransform(8, scale=(0.5, 1.5)), r"crop scale \(0.5, 1.5\) must be"),
        (lambda: TrainTransform(8, ratio=(2, 1)), r"crop ratio \(2, 1\) must be"),
        (lambda: TrainTransform(8, padding=8), "crop padding 8 must be at least 0 and less than the image size 8"),
        (lambda: TrainTransform(8, padding=-1), "crop padding -1 must be"),
        (lambda: TrainTransform(8, color_jitter=(0, -1, 0)), "color jitter"),
        (lambda: Normalize(std=(1, 0, 1)), r"std \(1, 0, 1\) must be positive"),
    ],
)
def test_settings_out_of_range_are_refused(make, message):
    with pytest.raises(RecipeError, match=message):
        make()
