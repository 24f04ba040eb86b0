"""How a command becomes a world of ranks: it joins the one a launcher made, or starts its own on this machine."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vitpar.errors import LaunchError, StrategyError
from vitpar.io import parse_json
from vitpar.launch.world import Device
from vitpar.strategy import Plan
from vitpar.strategy.plan_json import plan_from_json, plan_to_json
from vitpar.text import shown
from vitpar.training.recipe.recipe import Chosen

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from vitpar.launch import World


def choose_device(name: str | None) -> Device:
    """The kind of device to compute on: the one named, else CUDA where there is a GPU. Raises LaunchError."""
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise LaunchError(f"unknown device '{name}': use cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise LaunchError("device 'cuda' was asked for but this machine shows no CUDA GPU: use --device cpu")
    return "cuda" if name == "cuda" else "cpu"


def ranks_available(device: Device) -> int | None:
    """Ranks of the world a launcher made, else the GPUs of this machine; None on a CPU, which holds any number."""
    world = _given_world()
    if world is not None:
        return world.size
    if device == "cpu":
        return None
    import torch

    return torch.cuda.device_count()


def resolve(plan: Plan, device: Device) -> Plan:
    """The plan with its open degree filled for the ranks there are.

    A closed plan smaller than a machine's GPUs runs on some of them.
    """
    from vitpar.launch.resources import cpu_cores

    ranks = ranks_available(device)
    if _given_world() is not None or (plan.is_open and ranks is not None):
        assert ranks is not None
        return plan.resolve(ranks)
    if plan.is_open:
        return plan.resolve(cpu_cores())
    if ranks is not None and plan.world_size > ranks:
        raise StrategyError(
            f"'{shown(plan)}' needs {plan.world_size} devices but this machine has {ranks}: "
            f"use a smaller product of degrees, or --device cpu"
        )
    return plan


def _given_world() -> "World | None":
    """The world that another launcher made. The plan decided the size of one that this program started, so its ranks
    choose the plan from what the machine has, as the program did."""
    from vitpar.launch import find_world

    world = find_world()
    return None if world is None or world.launcher == "vitpar" else world


def enter(ranks: int, device: Device, *, saves: bool = False, chosen: Chosen | None = None) -> "World":
    """The world of `ranks` in which this process is one.

    Without a launcher and with more than one, this process starts them, each running the same command line, waits, and
    exits with their code. saves: whether ranks that are asked to end save first, and so are waited for. chosen: the
    plan to hand to the ranks that it starts (`handed_plan`), so that they run it whatever becomes of files meanwhile.
    """
    from vitpar.launch import ALONE, find_world, spawn

    world = find_world()
    if world is None and ranks > 1:
        # -P: no file of the folder we are in takes the place of a module.
        argv = ["-P", "-m", "vitpar_cli.main", *sys.argv[1:]]
        debug = bool(os.environ.get("VITPAR_DEBUG"))
        handed = chosen_to_text(chosen) if chosen else None
        raise typer.Exit(spawn(ranks, argv, device=device, handed=handed, debug=debug, patient=saves))
    return world or ALONE


def end(world: "World", code: int = 0) -> None:
    """Ends a rank, whose work is done, with `code`; a program that is alone goes on to its own end."""
    from vitpar.launch import ALONE, finish

    if world is not ALONE:
        finish(code)
    if code:
        raise typer.Exit(code)


def handed_plan() -> "Chosen | None":
    """Return the plan that the process which started this rank has chosen, None in any other process."""
    from vitpar.launch.world import HANDED, REPORTS

    handed = Path(os.environ.get(REPORTS, os.devnull)) / HANDED
    if not handed.exists():
        return None
    return chosen_from_text(handed.read_text(encoding="utf-8"))


def chosen_to_text(chosen: Chosen) -> str:
    """Return a plan as it is sent to other ranks of the same program."""
    return json.dumps({"plan": plan_to_json(chosen.plan), "because": chosen.because})


def chosen_from_text(text: str) -> Chosen:
    """Return the plan that `chosen_to_text` was given."""
    found = parse_json(text)
    return Chosen(plan_from_json(found["plan"]), found["because"])


def run_in_world(
    chosen: Chosen,
    device: Device,
    work: Callable[["torch.device"], int],
    *,
    saves: bool = False,
    store: "Store | None" = None,
) -> None:
    """Run `work` on every rank of a plan and exit with its code (the same on all ranks). saves: see `enter`. store: see
    `vitpar.launch.join`."""
    from vitpar.launch import join, leave

    plan = chosen.plan
    world = enter(plan.world_size, device, saves=saves, chosen=chosen)
    assert world.size == plan.world_size, f"'{plan}' was chosen in a world of {world.size}"
    code = work(join(world, device, store=store))
    leave()
    end(world, code)
