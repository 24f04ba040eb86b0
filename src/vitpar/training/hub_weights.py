"""Weights that a user names on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from vitpar.errors import LaunchError
from vitpar.launch import find_world
from vitpar.object_store import local
from vitpar.terminal import complain
from vitpar.weights.hub import HubName, hub_name, imported

Progress = Callable[[int, int], None]
"""Callback (done, total)."""
Showing = Callable[[str], AbstractContextManager[Progress]]
"""Function from a label to a context in which the progress of some work is shown."""


@contextmanager
def unshown(label: str) -> Iterator[Progress]:
    """Show no progress."""
    yield lambda done, total: None


def local_weights(place: Path, showing: Showing = unshown) -> Path:
    """Return `place`, or if it names weights on the hub, the folder under runs/hub into which they are imported.

    Raises DataError, also for object storage, and LaunchError under a launcher of several ranks, which would all
    download.
    """
    name = hub_name(str(place))
    return local(place) if name is None else _local(name, showing)


def _local(name: HubName, showing: Showing) -> Path:
    from vitpar.training.run_folder import RUNS

    world = find_world()
    if world is not None and world.size > 1:
        raise LaunchError(
            f"{name} would be downloaded by {world.size:,} ranks: run `vitpar checkpoint import {name} --out DIR` "
            "once, and give DIR"
        )
    with showing("importing") as progress:
        folder, notes = imported(name, RUNS / "hub", progress=progress)
    for note in notes:
        complain(note)
    return folder
