"""Run folders written by hand, with any metrics, for reports."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vitpar.strategy import parse
from vitpar.strategy.plan_json import write_plan

RECIPE = """
[model]
name = "vit_custom"
image_size = 8
patch_size = 2
embed_dim = 64
depth = 4
num_heads = 4

[data]
path = "data_shards/digits"

[train]
batch_size = 128
steps = {steps}
"""


def train_row(step: int, **changed: Any) -> dict[str, Any]:
    """Return a row of metrics.jsonl about a step."""
    row = {
        **{"kind": "train", "step": step, "epoch": step / 10, "samples": 128 * step, "loss": 2.3 / step**0.3},
        **{"lr": 1e-3, "grad_norm": 1.0, "step_ms": 100.0, "data_ms": 25.0, "images_per_second": 1280.0},
        **{"mfu": None, "memory_bytes": 10**9, "skipped": False},
    }
    return {**row, **changed}


def eval_row(step: int, **changed: Any) -> dict[str, Any]:
    """Return a row of metrics.jsonl about an evaluation."""
    row = {"kind": "eval", "step": step, "samples": 360, "loss": 2.0 / step**0.3, "top1": 1 - 1 / (1 + step / 9)}
    return {**row, "top5": 0.99, **changed}


def event(name: str, step: int = 1, text: str = "") -> dict[str, Any]:
    """Return a row of metrics.jsonl about an event."""
    return {"kind": "event", "event": name, "step": step, "text": text}


def start(mesh: str, steps: int, after: int = 0, changed: str = "") -> dict[str, Any]:
    """Return the row of metrics.jsonl about a start."""
    counts = {"train_samples": 1437, "val_samples": 360, "steps": steps, "batch_size": 128}
    about = {"model": "vit_custom", "parameters": 203_530, "plan": mesh, "device": "cpu", "changed": changed}
    return {**event("start", after), **about, **counts}


def write_run(
    folder: Path,
    rows: Iterable[dict[str, Any] | str],
    *,
    mesh: str = "dp2",
    events: Iterable[dict[str, Any]] | None = None,
    steps: int = 60,
    microbatches: int | None = None,
    **environment: Any,
) -> Path:
    """Write a run and return its folder.

    rows: rows of metrics.jsonl; a string is written as it is.
    events: further rows about events; None for those of a complete run.
    environment: content of env.json, besides a few versions.
    """
    from dataclasses import replace

    folder.mkdir(parents=True, exist_ok=True)
    every = [start(mesh, steps), *rows, event("done", steps)] if events is None else [*events, *rows]
    texts = (row if isinstance(row, str) else json.dumps(row) for row in every)
    (folder / "metrics.jsonl").write_text("".join(f"{text}\n" for text in texts))
    (folder / "log.txt").write_text("")
    (folder / "recipe.toml").write_text(RECIPE.format(steps=steps))
    write_plan(folder / "plan.json", replace(parse(mesh), microbatches=microbatches or 1))
    command = ["/usr/bin/vitpar", "train", "--mesh", mesh]
    about = {"commands": [[0, command]], "torch": "2.13.0", "python": "3.11.7", "devices": [], "cpu_count": 2}
    (folder / "env.json").write_text(json.dumps(about | environment))
    return folder
