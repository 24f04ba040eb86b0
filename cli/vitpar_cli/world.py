"""World of a command: its job runs on the ranks that a launcher started, or on ranks that are started here.

command ── prepares everything, then `run_in_world(ranks, device, work, arguments…)`
  ├── one rank, or ranks of torchrun, srun or mpirun: this process calls work(device, arguments…)
  └── else it starts ranks, which unpickle the job from a folder that only this user can enter, and run it
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import typer

from vitpar import tasks
from vitpar.launch import World, joined
from vitpar.launch.world import Device
from vitpar.models import own
from vitpar.own_files import NAMED
from vitpar.terminal import complain, is_terminal

if TYPE_CHECKING:
    from torch.distributed import Store

WORKER = ("-P", "-m", "vitpar_cli.worker")
"""Arguments of Python for a rank. -P: do not import modules from the current folder."""


@dataclass(frozen=True)
class Job:
    """Work of each rank of a world."""

    work: Callable[..., int]
    """Function at the top level of a module, of the rank's place and `arguments`; returns the exit code."""
    arguments: tuple[Any, ...]
    """Prepared arguments. Data sets are pickled as their folders, and opened again where they are unpickled."""
    command: list[str]
    """Command line of the user, for records of the run."""

    def run(self, world: World) -> int:
        """Run the job as a rank of `world`, and return its exit code."""
        return self.work(world, *self.arguments)

    def to_bytes(self) -> bytes:
        """Serialise the job, with the names of the user's models and tasks, which are classes of its arguments."""
        return pickle.dumps((NAMED, pickle.dumps(self)))

    @classmethod
    def read(cls, data: bytes) -> Self:
        """Return the job that `to_bytes` serialised.

        Raises ModelError and RecipeError for a file of the user that fails.
        """
        named, job = pickle.loads(data)
        for what, name in named:
            own.load(name) if what == "model" else tasks.load(name)
        return pickle.loads(job)


def run_in_world(
    ranks: int,
    device: Device | None,
    work: Callable[..., int],
    *arguments: object,
    saves: bool = False,
    store: Store | None = None,
) -> None:
    """Call ``work(place, *arguments)`` on each of `ranks` ranks, and exit with the code that it returns, if not 0.

    device: kind of device for which ranks join each other; their place is then their device. None: they do not join,
        and their place is the world.
    work: function at the top level of a module; returns the same exit code on all ranks.
    saves: whether ranks save a checkpoint when they are told to stop, so that this process must wait for them.
    store: as in ``vitpar.launch.join``; only for ranks of a launcher.
    """
    from vitpar.launch import ALONE, find_world, finish, spawn
    from vitpar.training.tracking import are_hanging

    if device is not None:
        work, arguments = _joined, (device, store, work, arguments)
    job, world = Job(work, arguments, sys.argv), find_world()
    if world is None and ranks > 1:
        if is_terminal(sys.stderr):
            complain(f"starting {ranks:,} ranks")  # each imports torch, which takes seconds
        raise typer.Exit(spawn(ranks, WORKER, handed=job.to_bytes(), patient=saves))
    code = job.run(world or ALONE)
    if world is not None or are_hanging():
        finish(code)
    if code:
        raise typer.Exit(code)


def _joined(
    world: World, device: Device, store: Store | None, work: Callable[..., int], arguments: tuple[object, ...]
) -> int:
    """Call `work` on the device of this rank of `world` after joining it."""
    with joined(world, device, store) as own_device:
        return work(own_device, *arguments)
