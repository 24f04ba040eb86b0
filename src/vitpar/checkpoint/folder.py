"""Checkpoints of a run: list them, tell complete from incomplete ones, delete old ones.

checkpoints/step_300/       complete: renamed to this after everything was written
checkpoints/step_350.partial, step_250.removed       left by a killed run; never read
"""

import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat

from vitpar.checkpoint.atomic import remove
from vitpar.checkpoint.index import INDEX, STATE, Index, damage, first_line, read_index
from vitpar.errors import CheckpointError
from vitpar.io import read_json
from vitpar.text import ranks

_NAME = re.compile(r"step_(\d+)")


class Scale(BaseModel):
    """State of the loss scale in float16."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    scale: PositiveFloat
    """Factor of the loss."""
    good_steps: NonNegativeInt
    """Steps since the last overflow or growth of the scale."""
    hysteresis_left: NonNegativeInt
    """Overflows left until the scale falls; 0 if each further one lowers it."""


class BestEvaluation(BaseModel):
    """The best evaluation so far."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    step: NonNegativeInt
    """Updates made before it."""
    metric: str
    """Metric by which it is the best."""
    value: float
    """Value of that metric."""


class Facts(BaseModel):
    """State of a run besides its tensors."""

    model_config = ConfigDict(extra="forbid")
    step: NonNegativeInt
    """Updates made."""
    samples: NonNegativeInt
    """Training samples seen so far."""
    data: str
    """Fingerprint of the training set."""
    loss_scale: Scale | None = None
    """State of the loss scale; None unless the run trains in float16."""
    best: BestEvaluation | None = None
    """Best evaluation so far; None if none is recorded."""
    attention: str | None = None
    """Kernel that computed attention. None leaves the choice to torch."""
    compiled: bool | None = None
    """Whether blocks were compiled."""
    optimizer: str | None = None
    """Implementation of the update."""
    teacher: str | None = None
    """Fingerprint of the teacher's weights; None without one."""


@dataclass(frozen=True)
class Checkpoint:
    """Opened checkpoint: its index and facts are read, its tensors are not."""

    path: Path
    index: Index
    facts: Facts

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the checkpoint at `path`. Raises CheckpointError if there is none."""
        index = read_index(path)
        try:
            facts = Facts.model_validate(read_json(path / STATE))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{STATE} of '{path}' cannot be read: {first_line(error)}: use another checkpoint"
            ) from None
        return cls(path, index, facts)

    @classmethod
    def open_whole(cls, path: Path) -> Self:
        """Open a checkpoint after verifying its files; each rank of the world reads a share of them. Collective.

        Raises CheckpointError on all ranks if there is none, any file is damaged, or ranks see different checkpoints.
        """
        import torch.distributed as dist

        from vitpar.launch.world_group import all_gather_json

        checkpoint, wrong = None, None
        try:
            checkpoint = cls.open(path)
            wrong = checkpoint.damage(dist.get_rank(), dist.get_world_size())
            wrong = wrong and f"the checkpoint '{path}' is damaged: {wrong}"
        except CheckpointError as error:
            wrong = str(error)
        everyone = all_gather_json([wrong, checkpoint.index.crc32 if checkpoint else None])
        if first := next((wrong for wrong, _ in everyone if wrong), None):
            raise CheckpointError(first)
        assert checkpoint is not None
        if others := [rank for rank, (_, crc) in enumerate(everyone) if crc != everyone[0][1]]:
            raise CheckpointError(
                f"{ranks(others)} found another checkpoint at '{path}' than rank 0: copy one to all machines, or use "
                "storage that they share"
            )
        return checkpoint

    def damage(self, part: int = 0, parts: int = 1) -> str | None:
        """Return the first problem of part `part` of `parts` of the files; None if there is none."""
        names = sorted(self.index.files)[part::parts]
        return damage(self.path, {name: self.index.files[name] for name in names})


class Checkpoints:
    """Checkpoints in one folder, which need not exist."""

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
        """Remove what killed runs left. A checkpoint that is complete except for its final name gets that name."""
        for path in self.folder.glob("step_*.partial"):
            with suppress(CheckpointError, OSError):
                whole = damage(path, Checkpoint.open(path).index.files, only_sizes=True) is None  # the index comes last
                if whole and not path.with_suffix("").exists():
                    path.rename(path.with_suffix(""))
        for path in [*self.folder.glob("step_*.partial"), *self.folder.glob("step_*.removed")]:
            shutil.rmtree(path, ignore_errors=True)

    def keep(self, steps: Iterable[int]) -> None:
        """Remove all checkpoints but those of `steps`. One that cannot be removed stays until the next call."""
        for step in set(self.steps()) - set(steps):
            with suppress(OSError):
                remove(self.path(step))
