"""Runs that are killed and resumed: their recipe, their processes and their metrics."""

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers.trained import recipe_text

RECIPE = recipe_text(
    **{"model.drop_path": 0.1, "model.dropout": 0.1, "augment.policy": "3a", "augment.mixup": 0.8},
    **{"data.path": "data", "optimizer.lr": 1e-3, "train.steps": 40, "train.batch_size": 8, "train.log_every": 1},
    **{"train.eval_every": 10, "train.ema_decay": 0.9, "checkpoint.every": 6},
)


def rows(folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the rows of metrics.jsonl by (kind, step), without an incomplete last one; fail if one appears twice."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
    found = [row for row in found if row["kind"] != "event"]
    by_key = {(row["kind"], row["step"]): row for row in found}
    assert len(by_key) == len(found), "a step stands twice"
    return by_key


def lines(folder: Path) -> int:
    try:
        return (folder / "metrics.jsonl").read_text().count("\n")
    except FileNotFoundError:
        return 0


def ranks_of(launcher: int) -> list[int]:
    """Return the process ids that a launcher has started."""
    pids: list[int] = []
    for path in Path(f"/proc/{launcher}/task").glob("*/children"):
        pids += [int(pid) for pid in path.read_text().split()]
    return pids


def alive(pids: list[int]) -> list[int]:
    """Return the process ids in `pids` that still run."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        found += [pid] * (state != "Z")
    return found


def wait_for(condition: Callable[[], bool], process: "subprocess.Popen[str]", ended: bool = False) -> None:
    """Wait for `condition` while `process` runs, 120 s at most.

    ended: whether `process` may have ended
    """
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end and (ended or process.poll() is None), process.communicate()[1]
        time.sleep(0.01)
