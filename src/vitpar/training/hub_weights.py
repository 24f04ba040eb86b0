"""Weights that a user names on the Hugging Face hub."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from vitpar.errors import LaunchError
from vitpar.launch import find_world
from vitpar.object_store import local
from vitpar.terminal import complain
from vitpar.weights.hub import hub_name, imported

Showing = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]
"""Context in which progress under a label is shown by the callback (done, total) that it gives."""


def local_weights(place: Path, showing: Showing = lambda label: nullcontext(lambda done, total: None)) -> Path:
    """Return `place`, or if it names weights on the hub, the folder under runs/hub into which they are imported.

    Raises DataError, also for object storage, and LaunchError under a launcher of several ranks, which would all
    download.
    """
    if (name := hub_name(str(place))) is None:
        return local(place)
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
