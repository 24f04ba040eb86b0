"""Packed image data sets, and each rank's batches of them.

>>> pack("digits", "data_shards/digits")
>>> shards = ShardSet.open("data_shards/digits", "train")
>>> order = Order(seed=0, size=len(shards))
>>> loader = TrainLoader(shards, TrainTransform(size=8, flip=0.0), order=order, batch_size=128)
>>> batch = next(iter(loader))
"""

from vitpar.data.decoding import Skipped
from vitpar.data.loader import Batch, EvalBatch, EvalLoader, TrainLoader
from vitpar.data.order import Order
from vitpar.data.shards import Labels, Reencode, ShardSet, index, pack, scan, verify
from vitpar.data.stream import Part, StreamEvalLoader, StreamLoader, StreamSet
from vitpar.data.survey import survey
from vitpar.data.transforms import EvalTransform, Mix, Mixed, Normalize, TrainTransform, parse_policy

__all__ = [
    "Batch",
    "EvalBatch",
    "EvalLoader",
    "EvalTransform",
    "Labels",
    "Mix",
    "Mixed",
    "Normalize",
    "Order",
    "Part",
    "Reencode",
    "ShardSet",
    "Skipped",
    "StreamEvalLoader",
    "StreamLoader",
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
