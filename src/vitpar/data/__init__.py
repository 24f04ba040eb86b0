"""Packed image data sets, and each rank's batches of them.

>>> pack("digits", "data_shards/digits")
>>> shards = ShardSet.open("data_shards/digits", "train")
>>> loader = TrainLoader(shards, TrainTransform(size=8, flip=0.0), batch_size=128)
>>> batch = next(iter(loader))
"""

from vitpar.data.decoding import Skipped
from vitpar.data.index import ShardSet, build_index
from vitpar.data.loader import Batch, EvalBatch, EvalLoader, TrainLoader
from vitpar.data.order import batch_samples, permutation
from vitpar.data.pack import pack
from vitpar.data.survey import survey
from vitpar.data.transforms import EvalTransform, Normalize, TrainTransform

__all__ = [
    "Batch",
    "EvalBatch",
    "EvalLoader",
    "EvalTransform",
    "Normalize",
    "ShardSet",
    "Skipped",
    "TrainLoader",
    "TrainTransform",
    "batch_samples",
    "build_index",
    "pack",
    "permutation",
    "survey",
]
