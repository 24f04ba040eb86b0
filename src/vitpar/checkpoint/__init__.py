"""The state of a run as a folder that any plan reads, whatever plan wrote it."""

from vitpar.checkpoint.folder import BestEvaluation, Checkpoint, Checkpoints, Facts, Scale
from vitpar.checkpoint.reader import load_tensors
from vitpar.checkpoint.writer import Writer

__all__ = ["BestEvaluation", "Checkpoint", "Checkpoints", "Facts", "Scale", "Writer", "load_tensors"]
