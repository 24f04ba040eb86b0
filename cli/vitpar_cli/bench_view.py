"""Output of `vitpar bench`: its progress and its results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitpar.models import ModelConfig
from vitpar.planner.cost.elements import layer_parameters
from vitpar.strategy import Plan
from vitpar.text import count, size
from vitpar_cli.outputs import data_table, facts_table
from vitpar_cli.plan_view import batch_rows, millions, percent

Numbers = dict[str, Any]
"""Part of a result of ``vitpar.bench.bench``."""
PLAIN_WIDTH = 100
"""Width of the output in columns if there is no terminal."""
NAMES = 10
"""Columns of the names of values."""
KERNELS = 12
"""Maximum number of kernels that are shown."""
FIGURES = 54
"""Columns of the table of kernels other than the name."""
SHORT = 1e-5
"""Seconds up to which a phase counts as empty, so that its share of the limit is meaningless."""


def show(benchmark: Numbers, config: ModelConfig, plan: Plan, traces: Path | None) -> None:
    """Print the setup, the result, the phases, and the kernels if they were recorded.

    benchmark: of the model `config` under `plan`.
    traces: folder of the traces.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PLAIN_WIDTH)
    for rows in (_ran(benchmark, config, plan), _reached(benchmark, config.sample)):
        console.print(facts_table(rows, NAMES))
        console.print()
    console.print(_phases(benchmark))
    if benchmark["kernels"] is not None:
        console.print(_kernels(benchmark["kernels"], benchmark["device"], console.width))
        console.print(
            Text(f"traces      {traces}/rank_*.json, for chrome://tracing or ui.perfetto.dev"), soft_wrap=True
        )


def _ran(benchmark: Numbers, config: ModelConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield names and values of the benchmark's setup."""
    parameters = sum(layer_parameters(config, Plan()).values())
    flops = f"{_short(config.flops)}FLOP per {config.sample} and step"
    yield "model", f"{config.name}, {millions(parameters)} parameters, {flops}"
    yield "mesh", f"{plan} on {count(plan.world_size, 'rank')} of {benchmark['device']}, {benchmark['device_name']}"
    yield from batch_rows(plan, benchmark["batch_size"], config.sample)
    attention = f", attention by {benchmark['attention']}" if benchmark["attention"] else ""
    yield "precision", benchmark["precision"] + (", blocks compiled" if benchmark["compile"] else "") + attention
    data, warm = benchmark["data"], benchmark["warm_up"]
    yield "input", data["name"] if data else f"synthetic: random {config.sample}s on the device"
    steady = "" if warm["steady"] else "; not steady yet"
    yield "warm-up", f"{count(warm['steps'], 'step')}{steady}"
    parts = (f"{name.replace('_', ' ')} {seconds:.1f} s" for name, seconds in benchmark["start_seconds"].items())
    yield "start", ", ".join(parts)


def _reached(benchmark: Numbers, sample: str) -> Iterator[tuple[str, str]]:
    """Yield names and values of the result."""
    rates, seconds = benchmark["rates"], benchmark["step_seconds"]
    how = f"{count(len(seconds['repeats']), 'repeat')} of {count(benchmark['steps'], 'step')}"
    yield "step", f"{_ms(seconds)} ms, mean ± deviation of {how}"
    yield "speed", f"{_spread(benchmark['images_per_second'], 1.0)} {sample}s/s"
    if benchmark["mfu"] is not None:
        yield "MFU", f"{percent(benchmark['mfu'])} of the data sheet's {_short(rates['peak'])}FLOP/s per rank"
    measured = f"{_short(rates['matmul'])}FLOP/s per rank, the measured rate of matrix products of these shapes"
    yield "products", f"{percent(benchmark['matmul_share'])} of {measured}"
    yield "memory", f"{size(benchmark['memory_bytes'])} on the fullest rank"
    if data := benchmark["data"]:
        synthetic = data["synthetic_step_seconds"]
        share = _spread(data["share"], 100.0, 1)
        yield "data share", f"{share} % of a step; with synthetic input a step takes {_ms(synthetic)} ms"
        if prepared := data["images_per_second_prepared"]:
            takes = benchmark["batch_size"] / synthetic["mean"]
            yield "images", f"the model takes {takes:,.0f}/s, the CPUs prepare {prepared:,.0f}/s"


def _phases(benchmark: Numbers) -> Table:
    whole, between = benchmark["phased_step_seconds"]["mean"], benchmark["between_seconds"]
    table = data_table("phase", numbers=("ms", "share", "slowest", "limit", "of limit"))
    table.columns[0].no_wrap = True
    for phase in benchmark["phases"]:
        mean, limit = phase["seconds"]["mean"], phase["limit_seconds"]
        table.add_row(
            phase["name"],
            _ms(phase["seconds"]),
            percent(mean / whole),
            _milliseconds(phase["slowest_rank_seconds"]),
            "" if limit is None else _milliseconds(limit),
            percent(phase["limit_share"]) if limit is not None and mean > SHORT else "",
        )
    table.add_row("between phases", _milliseconds(between), percent(between / whole))
    table.add_section()
    table.add_row("step, timed by phase", _ms(benchmark["phased_step_seconds"]))
    return table


def _kernels(kernels: list[Numbers], device: str, width: int) -> Table:
    kind = "kernel" if device == "cuda" else "operator"
    table = data_table(kind, numbers=("ms", "share", "calls", "FLOP/s", "of limit"))
    table.columns[0].no_wrap = True
    room = max(10, width - FIGURES)
    for kernel in kernels[:KERNELS]:
        name, flops = kernel["name"], kernel["flops"]
        table.add_row(
            name if len(name) <= room else f"{name[: room - 1]}…",
            _milliseconds(kernel["seconds"]),
            percent(kernel["share"]),
            f"{kernel['calls']:,.0f}",
            "" if flops is None else _short(flops / kernel["seconds"]),
            "" if flops is None else percent(kernel["limit_share"]),
        )
    rest = kernels[KERNELS:]
    if rest:
        seconds, share = (sum(kernel[key] for kernel in rest) for key in ("seconds", "share"))
        table.add_row(f"… {len(rest)} more", _milliseconds(seconds), percent(share))
    return table


def _ms(seconds: Numbers) -> str:
    digits = _digits(seconds["mean"])
    return f"{seconds['mean'] * 1e3:,.{digits}f} ± {seconds['deviation'] * 1e3:,.{digits}f}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.{_digits(seconds)}f}"


def _digits(seconds: float) -> int:
    return 2 if abs(seconds) < 0.1 else 1 if abs(seconds) < 1 else 0


def _spread(values: Numbers, factor: float, digits: int | None = None) -> str:
    mean, deviation = values["mean"] * factor, values["deviation"] * factor
    digits = (0 if mean >= 100 else 1) if digits is None else digits
    return f"{mean:,.{digits}f} ± {deviation:,.{digits}f}"


def _short(number: float) -> str:
    """Return a number with a metric prefix: 12.3e9 becomes `12.3 G`."""
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g} {prefix}"
    return f"{number:.3g} "
