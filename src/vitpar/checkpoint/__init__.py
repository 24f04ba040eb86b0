"""The state of a run as a folder that any plan reads, whatever plan wrote it."""

from vitpar.checkpoint.folder import Checkpoint, Checkpoints
from vitpar.checkpoint.state import load_tensors, save_tensors, sharded_as

__all__ = ["Checkpoint", "Checkpoints", "load_tensors", "save_tensors", "sharded_as"]
