"""Input from shards that cannot be read by offset: over http, out of object stores, from commands."""

from vitpar.data.stream.loader import StreamEvalLoader, StreamLoader
from vitpar.data.stream.stream_set import Part, StreamSet

__all__ = ["Part", "StreamEvalLoader", "StreamLoader", "StreamSet"]
