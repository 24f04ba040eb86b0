"""Checkpoints: the state of a run in a folder that any plan can read, whatever plan wrote it."""

from typing import TYPE_CHECKING

from vitpar.lazy import lazy_names

if TYPE_CHECKING:
    from vitpar.checkpoint.folder import BestEvaluation, Checkpoint, Checkpoints, Facts, Scale
    from vitpar.checkpoint.reader import load_tensors
    from vitpar.checkpoint.writer import Writer

_LAZY = {
    "vitpar.checkpoint.folder": ("BestEvaluation", "Checkpoint", "Checkpoints", "Facts", "Scale"),
    "vitpar.checkpoint.reader": ("load_tensors",),
    "vitpar.checkpoint.writer": ("Writer",),
}
__getattr__ = lazy_names(__name__, _LAZY)
__all__ = ["BestEvaluation", "Checkpoint", "Checkpoints", "Facts", "Scale", "Writer", "load_tensors"]
