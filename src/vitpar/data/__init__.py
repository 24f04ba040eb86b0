"""Packed data sets of images and text, and each rank's batches of them.

>>> pack("digits", "data_shards/digits")
>>> shards = ShardSet.open("data_shards/digits", "train")
>>> order = SampleOrder(seed=0, size=len(shards))
>>> loader = TrainLoader(shards, TrainTransform(size=8, flip=0.0), order=order, batch_size=128)
>>> batch = next(iter(loader))
"""

from typing import TYPE_CHECKING

from vitpar.lazy import lazy_names

if TYPE_CHECKING:
    from vitpar.data.cache import CachedSet, ImageCache, decoded_bytes
    from vitpar.data.loader import Batch, EvalLoader, Loader, LoaderSettings, Skipped, TrainLoader
    from vitpar.data.randomness import SampleOrder
    from vitpar.data.shards.index import Labels, index, scan
    from vitpar.data.shards.pack import Reencode, pack
    from vitpar.data.shards.shard_set import ShardSet
    from vitpar.data.shards.verify import verify
    from vitpar.data.stream.loader import StreamEvalLoader, StreamLoader
    from vitpar.data.stream.stream_set import StreamPart, StreamSet
    from vitpar.data.transforms.batch import Mix, Mixed, Normalize
    from vitpar.data.transforms.policies import parse_policy
    from vitpar.data.transforms.sample import EvalTransform, TrainTransform

_LAZY = {
    "vitpar.data.cache": ("CachedSet", "ImageCache", "decoded_bytes"),
    "vitpar.data.loader": ("Batch", "EvalLoader", "Loader", "LoaderSettings", "Skipped", "TrainLoader"),
    "vitpar.data.randomness": ("SampleOrder",),
    "vitpar.data.shards.index": ("Labels", "index", "scan"),
    "vitpar.data.shards.pack": ("Reencode", "pack"),
    "vitpar.data.shards.shard_set": ("ShardSet",),
    "vitpar.data.shards.verify": ("verify",),
    "vitpar.data.stream.loader": ("StreamEvalLoader", "StreamLoader"),
    "vitpar.data.stream.stream_set": ("StreamPart", "StreamSet"),
    "vitpar.data.transforms.batch": ("Mix", "Mixed", "Normalize"),
    "vitpar.data.transforms.policies": ("parse_policy",),
    "vitpar.data.transforms.sample": ("EvalTransform", "TrainTransform"),
}
__getattr__ = lazy_names(__name__, _LAZY)
__all__ = [
    "Batch",
    "CachedSet",
    "EvalLoader",
    "EvalTransform",
    "ImageCache",
    "Labels",
    "Loader",
    "LoaderSettings",
    "Mix",
    "Mixed",
    "Normalize",
    "Reencode",
    "SampleOrder",
    "ShardSet",
    "Skipped",
    "StreamEvalLoader",
    "StreamLoader",
    "StreamPart",
    "StreamSet",
    "TrainLoader",
    "TrainTransform",
    "decoded_bytes",
    "index",
    "pack",
    "parse_policy",
    "scan",
    "verify",
]
