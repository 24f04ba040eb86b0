"""`vitpar doctor`: report the resources of this machine and problems with it."""

import json
from collections.abc import Iterator
from typing import Any

import typer
from rich.console import Console
from rich.filesize import decimal

from vitpar.doctor import collect, problems
from vitpar_cli.outputs import facts_table, print_words

COLOURS = {"error": "red", "warning": "yellow"}
"""Colour of messages by severity."""


def doctor(json_: bool = typer.Option(False, "--json", help="Print the findings as JSON.")) -> None:
    """Check versions, devices and limits, and that two local ranks work together; exit with 1 if something is broken.

    Example: vitpar doctor
    """
    report = collect()
    messages = problems(report)
    if json_:
        listed = [{"severity": severity, "message": message} for severity, message in messages]
        print(json.dumps(report | {"problems": listed}, indent=2))
    else:
        console = Console()
        console.print(facts_table(_rows(report)))
        for severity, message in messages:
            print_words(console, f"{severity}: {message}", COLOURS[severity])
        if not messages:
            console.print("[green]no problems found[/]")
    if any(severity == "error" for severity, _ in messages):
        raise typer.Exit(1)


def _rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the rows of the report as (name, text)."""
    system, limits, world, local = (report[key] for key in ("system", "limits", "world", "local_world"))
    yield "versions", ", ".join(f"{name} {version or 'missing'}" for name, version in report["versions"].items())
    yield "system", system["os"]
    yield "cpu", f"{system['cores']} cores, {report['cpu_capability']}"
    yield "memory", f"{_size(system['memory_bytes'])}, {_size(system['memory_available_bytes'])} of it free"
    for index, device in enumerate(report["devices"]):
        major, minor = device["compute_capability"]
        yield f"gpu {index}", f"{device['name']}, {_size(device['memory_bytes'])}, compute capability {major}.{minor}"
    if not report["devices"]:
        yield "gpu", "none"
    yield "backends", ", ".join(name for name in ("gloo", "nccl") if report["distributed"][name]) or "none"
    rank = "{launcher}, rank {rank} of {size}"
    yield "launcher", "none" if world is None else world.get("error") or rank.format_map(world)
    yield "local ranks", f"2 ranks all-reduced in {local['seconds']} s" if local["ok"] else local["error"]
    yield (
        "limits",
        f"{limits['open_files'] or 'unlimited'} open files, {limits['user_processes'] or 'unlimited'} processes",
    )
    yield "shared memory", _size(limits["shared_memory_bytes"])
    yield "C++ compiler", report["compiler"] or "none"


def _size(count: int | None) -> str:
    return "unknown" if count is None else decimal(count)
