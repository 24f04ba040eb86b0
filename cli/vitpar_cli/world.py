"""World of a command: join the ranks that a launcher started, or start ranks on this machine."""

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
    """Return the kind of device to compute on: `name`, or if None, CUDA if there is a GPU and else the CPU.

    Raises LaunchError for an unknown or missing device.
    """
    from vitpar.launch.resources import has_cuda

    if name is None:
        return "cuda" if has_cuda() else "cpu"
    if name not in ("cpu", "cuda"):
        raise LaunchError(f"unknown device '{name}': use cpu or cuda")
    if name == "cuda" and not has_cuda():
        raise LaunchError("device is 'cuda' but this machine has no CUDA GPU: use --device cpu")
    return "cuda" if name == "cuda" else "cpu"


def ranks_available(device: Device) -> int | None:
    """Return the number of ranks that a launcher started, or else the number of GPUs of this machine.

    None means any number, on a CPU without a launcher.
    """
    world = _given_world()
    if world is not None:
        return world.size
    if device == "cpu":
        return None
    import torch

    return torch.cuda.device_count()


def resolve(plan: Plan, device: Device) -> Plan:
    """Return the plan with its open degree resolved for the number of available ranks.

    A plan without an open degree may use fewer ranks than the machine has GPUs.

    Raises StrategyError for a plan that does not fit the available ranks.
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
    """Return the world of an external launcher; None without one.

    A world that vitpar started itself does not count. Its size follows from the plan, so its ranks must resolve the
    plan from the machine's resources, as the process that started them did.
    """
    from vitpar.launch import find_world

    world = find_world()
    return None if world is None or world.launcher == "vitpar" else world


def enter(ranks: int, device: Device, *, saves: bool = False, chosen: Chosen | None = None) -> "World":
    """Return the world that this process belongs to, after starting its ranks if needed.

    Without a launcher and with more than one rank, this process starts ranks that run the same command line, waits for
    them and exits with their exit code.

    ranks: number of ranks to start.
    saves: whether ranks save a checkpoint when they are told to stop, so that this process must wait for them.
    chosen: plan to pass to the ranks that are started (`handed_plan`), so that they use it even if files change.

    Raises typer.Exit in a process that started ranks.
    """
    from vitpar.launch import ALONE, find_world, spawn

    world = find_world()
    if world is None and ranks > 1:
        # -P: do not import modules from the current folder.
        argv = ["-P", "-m", "vitpar_cli.main", *sys.argv[1:]]
        debug = bool(os.environ.get("VITPAR_DEBUG"))
        handed = chosen_to_text(chosen) if chosen else None
        raise typer.Exit(spawn(ranks, argv, device=device, handed=handed, debug=debug, patient=saves))
    return world or ALONE


def end(world: "World", code: int = 0) -> None:
    """End a rank whose work is done with exit code `code`.

    A process that is alone returns from here if `code` is 0, and raises typer.Exit otherwise.
    """
    from vitpar.launch import ALONE, finish

    if world is not ALONE:
        finish(code)
    if code:
        raise typer.Exit(code)


def handed_plan() -> "Chosen | None":
    """Return the plan that the process that started this rank passed to it; None in any other process."""
    from vitpar.launch.world import HANDED, REPORTS

    handed = Path(os.environ.get(REPORTS, os.devnull)) / HANDED
    if not handed.exists():
        return None
    return chosen_from_text(handed.read_text(encoding="utf-8"))


def chosen_to_text(chosen: Chosen) -> str:
    """Serialise a plan for other ranks of the same program."""
    return json.dumps({"plan": plan_to_json(chosen.plan), "because": chosen.because})


def chosen_from_text(text: str) -> Chosen:
    """Return the plan that `chosen_to_text` serialised."""
    content = parse_json(text)
    return Chosen(plan_from_json(content["plan"]), content["because"])


def run_in_world(
    chosen: Chosen,
    device: Device,
    work: Callable[["torch.device"], int],
    *,
    saves: bool = False,
    store: "Store | None" = None,
) -> None:
    """Run `work` on every rank of a plan and exit with the code that it returns.

    work: function of the rank's device; returns the same exit code on all ranks.
    saves: as in `enter`.
    store: as in `vitpar.launch.join`.
    """
    from vitpar.launch import join, leave

    plan = chosen.plan
    world = enter(plan.world_size, device, saves=saves, chosen=chosen)
    assert world.size == plan.world_size, f"'{plan}' was chosen in a world of {world.size}"
    code = work(join(world, device, store=store))
    leave()
    end(world, code)
