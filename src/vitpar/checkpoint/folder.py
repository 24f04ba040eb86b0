"""Checkpoints of a run: list them, tell complete from incomplete ones, delete old ones.

checkpoints/step_300/       complete: renamed to this after everything was written
checkpoints/step_350.partial, step_250.removed       left by a killed run; never read
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, ValidationError

from vitpar.checkpoint.atomic import remove
from vitpar.checkpoint.index import INDEX, STATE, Index, damage, first_line, read_index
from vitpar.errors import CheckpointError
from vitpar.io import read_bytes
from vitpar.launch.world_group import all_gather_json
from vitpar.limits import MAX_JSON_BYTES

_NAME = re.compile(r"step_(\d+)")


class Scale(BaseModel):
    """State of the scale of a float16 loss."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    scale: PositiveFloat
    good_steps: NonNegativeInt
    hysteresis_left: NonNegativeInt


class BestEvaluation(BaseModel):
    """The best evaluation so far."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    step: NonNegativeInt
    top1: float


class Facts(BaseModel):
    """State of a run besides its tensors. step: updates made. samples: of the training set, seen so far. data: the
    fingerprint of the training set. attention: the kernel that computed it, None for whatever torch takes.
    compiled: whether blocks were."""

    model_config = ConfigDict(extra="forbid")
    step: NonNegativeInt
    samples: NonNegativeInt
    data: str
    loss_scale: Scale | None = None
    best: BestEvaluation | None = None
    attention: str | None = None
    compiled: bool | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was opened: its index and facts are read, its tensors are not."""

    path: Path
    index: Index
    facts: Facts

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Raises CheckpointError where `path` is none."""
        index = read_index(path)
        try:
            facts = Facts.model_validate_json(read_bytes(path / STATE, MAX_JSON_BYTES))
        except (OSError, ValidationError) as error:
            raise CheckpointError(
                f"{STATE} of '{path}' cannot be read: {first_line(error)}: use another checkpoint"
            ) from None
        return cls(path, index, facts)

    @classmethod
    def open_whole(cls, path: Path) -> Checkpoint:
        """The checkpoint, with files as they were written; all ranks of the world look at a part of them. Collective.

        Raises CheckpointError on all of them.
        """
        found, wrong = None, None
        try:
            found = cls.open(path)
            wrong = found.damage(dist.get_rank(), dist.get_world_size())
            wrong = wrong and f"the checkpoint '{path}' is damaged: {wrong}"
        except CheckpointError as error:
            wrong = str(error)
        if first := next(filter(None, all_gather_json(wrong)), None):
            raise CheckpointError(first)
        assert found is not None
        return found

    def damage(self, part: int = 0, parts: int = 1) -> str | None:
        """Return what is wrong with the files, None if nothing is. Of `parts` readers, this is number `part`."""
        names = sorted(self.index.files)[part::parts]
        return damage(self.path, {name: self.index.files[name] for name in names})


class Checkpoints:
    """The checkpoints in one folder, which need not exist."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint of `step`."""
        return self.folder / f"step_{step}"

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, oldest first."""
        names = (_NAME.fullmatch(path.name) for path in self.folder.glob("step_*"))
        return sorted(int(name[1]) for name in names if name and (self.folder / name[0] / INDEX).exists())

    def clear(self) -> None:
        """Remove what killed runs left; one that was written in full, but has not got its name, gets it."""
        for path in self.folder.glob("step_*.partial"):
            with suppress(CheckpointError, OSError):
                whole = damage(path, Checkpoint.open(path).index.files, only_sizes=True) is None  # the index comes last
                if whole and not path.with_suffix("").exists():
                    path.rename(path.with_suffix(""))
        for path in [*self.folder.glob("step_*.partial"), *self.folder.glob("step_*.removed")]:
            shutil.rmtree(path, ignore_errors=True)

    def keep(self, steps: Iterable[int]) -> None:
        """Remove all but these. What cannot be removed is left for the next time."""
        for step in set(self.steps()) - set(steps):
            with suppress(OSError):
                remove(self.path(step))
