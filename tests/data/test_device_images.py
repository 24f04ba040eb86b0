"""Images held on a device: batches of tensors have the pixels of the host's transform of one image, bit by bit."""

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from bench.photographs import photograph
from helpers.policy_operations import by_pillow, changed, drawn
from helpers.small_data import damage, pack_small
from vitpar.data.cache import SharedPixels, decode_into, refuse_unequal, stored_shape
from vitpar.data.loader import Batch, EvalLoader, TrainLoader
from vitpar.data.randomness import Draws, SampleOrder, sample_keys
from vitpar.data.shards.pack import pack
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.transforms.drawn import DrawnBatch
from vitpar.data.transforms.policies import OPERATIONS, parse_policy
from vitpar.data.transforms.sample import EvalTransform, TrainTransform
from vitpar.errors import DataError

SIDE, FILL, MEAN = 24, (124, 116, 104), (0.485, 0.456, 0.406)
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def pictures() -> NDArray[np.uint8]:
    """Return 288 images: parts of photographs, noise, dark noise, gradients, and single colours."""
    draw = np.random.default_rng(0)
    parts = []
    for _ in range(2):
        photo = np.asarray(Image.open(BytesIO(photograph(draw))))
        for _ in range(64):
            top, left = draw.integers(0, 300, 2)
            parts.append(photo[top : top + SIDE, left : left + SIDE])
    noise = draw.integers(0, 256, (64, SIDE, SIDE, 3), dtype=np.uint8)
    ramp = (np.arange(SIDE)[:, None, None] * draw.integers(-9, 10, (32, 1, 1, 3)) + 128).astype(np.uint8)
    ramps = np.broadcast_to(ramp, (32, SIDE, SIDE, 3))
    plain = np.broadcast_to(draw.integers(0, 256, (32, 1, 1, 3), dtype=np.uint8), (32, SIDE, SIDE, 3))
    return np.concatenate([np.stack(parts), noise, noise[:32] // 16, ramps, plain])


PICTURES = pictures()
STORED = torch.from_numpy(PICTURES).permute(0, 3, 1, 2).contiguous()
NUMBERS = np.arange(len(PICTURES))
KEYS = sample_keys(3, np.zeros_like(NUMBERS), NUMBERS, np.zeros_like(NUMBERS))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("increasing", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_on_batches_equal_those_on_images(name: str, increasing: bool, device: str) -> None:
    """Every operation, at all levels, has the pixels of Pillow."""
    values = drawn(name, NUMBERS % 101 / 10, KEYS, SIDE, increasing)
    expected = [
        by_pillow(name, Image.fromarray(image), value, FILL)
        for image, value in zip(PICTURES, values.tolist(), strict=True)
    ]
    found = changed(name, STORED.to(device), values, MEAN)
    assert torch.equal(found.cpu().permute(0, 2, 3, 1), torch.from_numpy(np.stack(expected)))


PADDED: dict[str, Any] = {"padding": 4}
CHAINS: dict[str, dict[str, Any]] = {
    "padded": PADDED,
    "padded, larger than the image": {"padding": 2, "size": 40},
    "padded, smaller": {"padding": 3, "size": 15, "flip": 0.9},
    "resized": {},
    "resized, bilinear": {"interpolation": "bilinear"},
    "enlarged": {"size": 40, "ratio": (0.2, 5.0)},
    "reduced": {"size": 7, "scale": (0.5, 1.0)},
    "crops that do not fit": {"scale": (0.9, 1.0), "ratio": (3.0, 4.0)},
    "jitter": {**PADDED, "color_jitter": (0.4, 0.4, 0.4)},
    "jitter of two": {**PADDED, "color_jitter": (1.5, 0.0, 0.8)},
    "erased": {**PADDED, "erase": 0.7, "mean": (0.3, 0.5, 0.6), "std": (0.2, 0.3, 0.25)},
    **{
        text: {**PADDED, "policy": parse_policy(text)}
        for text in (
            *("rand", "rand-m9-n3-p1", "rand-m9-mstd0.5-inc1", "rand-m8-p0.3-mstd101"),
            *("original", "cifar10", "svhn", "3a"),
        )
    },
    "all": {
        "policy": parse_policy("rand-m9-n3-p1-mstd2"),
        "color_jitter": (0.3, 0.4, 0.2),
        "erase": 0.4,
        "mean": (0.49, 0.48, 0.44),
    },
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("settings", CHAINS.values(), ids=CHAINS)
def test_crops_of_stored_images_equal_those_of_the_host(settings: dict[str, Any], device: str) -> None:
    transform, draws = TrainTransform(**{"size": SIDE, **settings}), Draws(KEYS)
    work = transform.stored(NUMBERS, draws, SIDE, SIDE) + transform.work(draws)
    found = DrawnBatch(STORED.to(device), work, transform).made(lambda tensor: tensor.to(device))
    assert torch.equal(found.cpu(), transform(PICTURES, KEYS))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_small(tmp_path_factory.mktemp("packed"))


def held(images: ShardSet, transform: EvalTransform | None = None) -> Tensor:
    """Return all images of a set, with a black one more if they are transformed."""
    count, *shape = stored_shape(images)
    if transform is not None:
        count, shape = count + 1, [3, transform.size, transform.size]
    memory = SharedPixels([(count, shape[0], shape[1], shape[2])])
    decode_into(memory.images[0], images, range(0, len(images), 2), transform, 1)
    decode_into(memory.images[0], images, range(1, len(images), 2), transform, 2)
    return memory.images[0]


def same(one: Batch, other: Batch) -> bool:
    assert isinstance(one.images, Tensor) and isinstance(other.images, Tensor)
    pairs = (one.images, other.images), (one.labels, other.labels), (one.keys, other.keys)
    return all(torch.equal(*pair) for pair in pairs) and (one.samples, one.epoch) == (other.samples, other.epoch)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("start", [0, 24, 31])
def test_batches_are_those_of_the_host(packed: Path, workers: int, start: int) -> None:
    """Over two epochs, from any sample on, for some rows of a batch, also if the size of images changes."""
    images = ShardSet.open(packed, "train")
    transform = TrainTransform(8, policy=parse_policy("rand-m9-n2-p1"), erase=0.5)
    order = SampleOrder(5, len(images), repeats=2)
    common: dict[str, Any] = {"order": order, "start": start, "batch_size": 12, "rows": [7, 2, 3], "workers": workers}
    common["sizes"] = lambda done: 8 if done < start + 36 else 6
    ours, theirs = (TrainLoader(images, transform, stored=stored, **common) for stored in (held(images), None))
    for device, most in (("cpu", 8), ("meta", 2)):  # a GPU gets few threads
        loader = TrainLoader(images, transform, stored=STORED.to(device), order=order, batch_size=1, workers=8)
        assert loader.workers == most
    threads = torch.get_num_threads()
    for _, one, other in zip(range(8), ours, theirs, strict=False):
        assert same(one, other)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("rows", [None, [9, 8, 1], []])
def test_evaluation_has_the_batches_of_the_host(packed: Path, rows: list[int] | None) -> None:
    images = ShardSet.open(packed, "val")
    transform = EvalTransform(8, crop_pct=0.9)
    common: dict[str, Any] = {"batch_size": 10, "rows": rows}
    ours = [*EvalLoader(images, transform, stored=held(images, transform), **common)]
    theirs = [*EvalLoader(images, transform, **common)]
    assert len(ours) == len(theirs) == 2
    if rows == []:
        assert all(batch.images is None for batch in (*ours, *theirs))
    else:
        assert all(same(*pair) for pair in zip(ours, theirs, strict=True))


def test_bad_and_unequal_images_are_refused(tmp_path: Path) -> None:
    data = pack_small(tmp_path, val=False)
    name = damage(data, "train", 20)
    images = ShardSet.open(data, "train")
    with pytest.raises(DataError, match=f"sample '{name}' of .*: its checksum differs"):
        held(images)
    other = tmp_path / "other"
    for number, size in enumerate(((8, 8), (8, 8), (8, 9))):
        path = tmp_path / "pictures" / "train" / "a" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size).save(path)
    pack(tmp_path / "pictures", other, val_fraction=0)
    unequal = ShardSet.open(other, "train")
    for refuse in (held, refuse_unequal):
        with pytest.raises(DataError, match=r"needs training images of one size, but sample .* has 9 x 8 .* 8 x 8"):
            refuse(unequal)
