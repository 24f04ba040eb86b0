"""Data sets as they lie on disks: WebDataset tar shards, and an index beside them."""

from vitpar.data.shards.foreign import index
from vitpar.data.shards.pack import Reencode, pack
from vitpar.data.shards.scan import Labels, scan
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.shards.verify import verify

__all__ = ["Labels", "Reencode", "ShardSet", "index", "pack", "scan", "verify"]
