"""Packed image data sets, and each rank's batches of them.

>>> pack("digits", "data_shards/digits")
>>> shards = ShardSet.open("data_shards/digits", "train")
>>> order = Order(seed=0, size=len(shards))
>>> loader = TrainLoader(shards, TrainTransform(size=8, flip=0.0), order=order, batch_size=128)
>>> batch = next(iter(loader))
"""

from vitpar.data.loader import Batch, EvalLoader, Loader, LoaderSettings, Skipped, TrainLoader
from vitpar.data.randomness import SampleOrder
from vitpar.data.shards.index import Labels, index, scan
from vitpar.data.shards.pack import Reencode, pack
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.shards.verify import verify
from vitpar.data.stream.loader import StreamEvalLoader, StreamLoader
from vitpar.data.stream.stream_set import StreamPart, StreamSet
from vitpar.data.survey import survey
from vitpar.data.transforms.batch import Mix, Mixed, Normalize
from vitpar.data.transforms.policies import parse_policy
from vitpar.data.transforms.sample import EvalTransform, TrainTransform

__all__ = [
    "Batch",
    "EvalLoader",
    "EvalTransform",
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
    "index",
    "pack",
    "parse_policy",
    "scan",
    "survey",
    "verify",
]
