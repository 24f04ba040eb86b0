"""The state of a run as a folder that any plan reads, whatever plan wrote it."""

from vitpar.checkpoint.folder import Best, Checkpoint, Checkpoints, Facts, Scale
from vitpar.checkpoint.state import load_tensors, save_tensors

__all__ = ["Best", "Checkpoint", "Checkpoints", "Facts", "Scale", "load_tensors", "save_tensors"]
