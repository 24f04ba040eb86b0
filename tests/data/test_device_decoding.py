"""JPEGs that the device of a model decodes: crops like those of the host, and other images by the host.

torchcodec needs a CUDA build of torch (`make test-decode`). Where it cannot be imported, its decoder is replaced by a
small one, so that all other lines run.
"""

import io
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image

from bench.photographs import photograph
from helpers.small_data import first
from helpers.tiny_images import saved
from vitpar.data import device_decoding as decoding
from vitpar.data.images import opened
from vitpar.data.loader import TrainLoader
from vitpar.data.randomness import SampleOrder
from vitpar.data.shards.pack import pack
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.transforms.policies import parse_policy
from vitpar.data.transforms.sample import TrainTransform
from vitpar.errors import DataError, RecipeError

PHOTO = np.asarray(Image.open(io.BytesIO(photograph(np.random.default_rng(0)))))
ROTATED = Image.Exif()
ROTATED[0x0112] = 6
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LEVELS, MEAN = (3, 0.5) if DEVICE.type == "cpu" else (48, 2.0)
"""Most grey levels by which decoders and ways to resize may differ, at one place and on average."""


def replaced(sources, mode, device):
    """Decode as torchcodec does."""
    assert mode == "RGB"
    try:
        images = [simplejpeg.decode_jpeg(bytes(source.numpy()), strict=True) for source in sources]
    except ValueError as error:
        raise RuntimeError("nvJPEG failed") from error
    return [torch.from_numpy(image).permute(2, 0, 1).to(device) for image in images]


@pytest.fixture
def decoder(monkeypatch):
    try:
        import torchcodec.decoders  # noqa: F401
    except Exception:
        module = SimpleNamespace(decode_jpeg=replaced)
        monkeypatch.setitem(sys.modules, "torchcodec", SimpleNamespace(decoders=module))
        monkeypatch.setitem(sys.modules, "torchcodec.decoders", module)
        monkeypatch.setattr(decoding, "version", lambda name: "0.16.0")
    return decoding.DeviceDecoder(DEVICE)


def file(number, kind="JPEG", mode="RGB", **options):
    """Return a part of a photograph as an encoded file."""
    return saved(Image.fromarray(PHOTO[number : 120 + 5 * number, 3 * number : 200]).convert(mode), kind, **options)


OTHERS = {
    "png": file(3, "PNG"),
    "progressive": file(4, progressive=True),
    "CMYK": file(5, mode="CMYK"),
    "rotated": file(6, exif=ROTATED),
}
"""Images that the host decodes."""


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Pack photographs, grey ones, those of OTHERS, and one whose last third is missing."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "source" / "train" / "ant").mkdir(parents=True)
    files = [file(0), file(1, mode="L"), file(2)[: -len(file(2)) // 3], *OTHERS.values(), file(7), file(8)]
    for number, data in enumerate(files):
        (folder / "source" / "train" / "ant" / f"{number}.jpg").write_bytes(data)
    pack(folder / "source", folder / "packed", decode_images=False)
    return folder / "packed"


def batches(packed, transform, **settings):
    shards = ShardSet.open(packed, "train")
    loader = TrainLoader(shards, transform, order=SampleOrder(0, len(shards)), batch_size=16, **settings)
    return first(loader, 2), loader


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("at_once", [1, 1 << 27], ids=["one by one", "together"])
def test_crops_and_order_are_those_of_the_host(packed, decoder, monkeypatch, workers, at_once):
    monkeypatch.setattr(decoding, "GPU_DECODED_BYTES", at_once)
    views = [TrainTransform(48), TrainTransform(32, interpolation="bilinear", flip=1.0)]
    wanted, host = batches(packed, views, bad_sample="skip", workers=workers)
    found, loader = batches(packed, views, bad_sample="skip", workers=workers, decoder=decoder, device=DEVICE)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.labels, theirs.labels)
        for images, expected in zip((ours.images, *ours.further), (theirs.images, *theirs.further), strict=True):
            difference = (images.cpu().int() - expected.int()).abs()
            assert difference.max() <= LEVELS, difference.flatten(1).amax(1)
            assert difference.float().mean() < MEAN
            assert images.float().std() > 1, "images are flat"
    assert loader.skipped == host.skipped
    assert loader.skipped.times


def test_policies_follow_on_the_device(packed, decoder):
    transform = TrainTransform(48, policy=parse_policy("rand-m9-n2-p1"))
    wanted, _ = batches(packed, transform, bad_sample="skip")
    found, _ = batches(packed, transform, bad_sample="skip", decoder=decoder, device=DEVICE)
    images = found[0].images if DEVICE.type == "cpu" else found[0].images.made(lambda sent: sent.to(DEVICE)).cpu()
    differing = (images.int() - wanted[0].images.int()).abs() > LEVELS
    assert differing.float().mean() < 0.1  # where a threshold lies between two levels


def test_host_decodes_what_gpus_do_not():
    assert not any(opened(data).for_gpu for data in OTHERS.values())
    assert opened(file(0)).for_gpu
    assert opened(file(1, mode="L")).for_gpu


def test_damaged_image_is_named(packed, decoder):
    with pytest.raises(DataError, match=r"sample 'train-0.*/0000000\d' of .*; replace it"):
        batches(packed, TrainTransform(48), decoder=decoder)


def test_missing_torchcodec_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    with pytest.raises(RecipeError, match=r"needs torchcodec 0\.16 or newer, which cannot be imported"):
        decoding.DeviceDecoder(torch.device("cpu"))
