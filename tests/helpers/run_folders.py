"""Run folders written by hand, with any metrics, for reports."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vitpar.strategy import parse
from vitpar.strategy.plan_json import write_plan
from vitpar.text import log_line

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


def start_line(mesh: str, steps: int) -> str:
    """Return the line of log.txt about a start."""
    counts = "1,437 training images, 360 validation images"
    return f"start  vit_custom, 203,530 parameters, {mesh} on cpu, {counts}, {steps:,} steps of batch size 128"


def write_run(
    folder: Path,
    rows: Iterable[dict[str, Any] | str],
    *,
    mesh: str = "dp2",
    log: Iterable[str] | None = None,
    steps: int = 60,
    microbatches: int | None = None,
    **environment: Any,
) -> Path:
    """Write a run and return its folder.

    rows: rows of metrics.jsonl; a string is written as it is.
    log: lines of log.txt without dates; None for those of a complete run.
    environment: content of env.json, besides a few versions.
    """
    from dataclasses import replace

    folder.mkdir(parents=True, exist_ok=True)
    texts = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    (folder / "metrics.jsonl").write_text("".join(f"{text}\n" for text in texts))
    lines = [start_line(mesh, steps), "done  val loss 0.1655  top-1 97.80%  top-5 100.00%  weights x"]
    (folder / "log.txt").write_text("".join(map(log_line, lines if log is None else log)))
    (folder / "recipe.toml").write_text(RECIPE.format(steps=steps))
    write_plan(folder / "plan.json", replace(parse(mesh), microbatches=microbatches or 1))
    command = ["/usr/bin/vitpar", "train", "--mesh", mesh]
    about = {"command": command, "torch": "2.13.0", "python": "3.11.7", "devices": [], "cpu_count": 2}
    (folder / "env.json").write_text(json.dumps(about | environment))
    return folder
