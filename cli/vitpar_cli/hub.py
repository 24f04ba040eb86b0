"""Weights that a command names on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from vitpar.errors import LaunchError
from vitpar.launch import find_world
from vitpar.object_store import local
from vitpar.terminal import complain
from vitpar.weights.hub import HubName, hub_name, imported
from vitpar_cli.outputs import progress_bar


def local_weights(place: Path) -> Path:
    """Return `place`, or if it names weights on the hub, the folder under runs/hub into which they are imported.

    Raises DataError, also for object storage, and LaunchError under a launcher of several ranks, which would all
    download.
    """
    name = hub_name(str(place))
    return local(place) if name is None else _local(name)


def _local(name: HubName) -> Path:
    from vitpar.training.run_folder import RUNS

    world = find_world()
    if world is not None and world.size > 1:
        raise LaunchError(
            f"{name} would be downloaded by {world.size:,} ranks: run `vitpar checkpoint import {name} --out DIR` "
            "once, and give DIR"
        )
    with progress_bar("importing") as progress:
        folder, notes = imported(name, RUNS / "hub", progress=progress)
    for note in notes:
        complain(note)
    return folder
