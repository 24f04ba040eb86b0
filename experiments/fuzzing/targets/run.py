"""Target: folders of runs, read for a report and for a list."""

from __future__ import annotations

import json
import random
from pathlib import Path

from fuzzing import oracle
from fuzzing.attacks.jsons import json_attack
from fuzzing.attacks.tomls import toml_attack
from fuzzing.target import Case, Files, FileTarget
from vitpar.planner.cost import pipeline  # noqa: F401, a report imports it, and torch, when it draws a pipeline
from vitpar.runs.folder import RunRecord, refuse_other_folders
from vitpar.runs.listing import runs_in
from vitpar.runs.page import report
from vitpar.strategy import parse
from vitpar.strategy.plan_json import plan_text

RECIPE = b"""
[model]
name = "vit_custom"
image_size = 8
patch_size = 2
embed_dim = 64
depth = 4
num_heads = 4
[data]
path = "data"
[train]
batch_size = 128
steps = 4
"""
START = (
    "2026-01-02 03:04:05 start  vit_custom, 203,530 parameters, {} on cpu, 1,437 training images, "
    "360 validation images, 4 steps of batch size 128\n"
)
LINES = (
    "2026-01-02 03:04:06 saving step 2: training waited 0.010 s\n",
    "2026-01-02 03:04:07 warning: the learning rate is large\n",
    "2026-01-02 03:04:08 resuming from run/checkpoints/step_2: 2 steps done\n",
    "2026-01-02 03:04:09 done  val loss 0.5000  top-1 50.00%  top-5 99.00%  weights run/weights\n",
)
ROW = {"epoch": 0.1, "lr": 0.001, "grad_norm": 1.5, "step_ms": 100.5, "data_ms": 2.5, "images_per_second": 1274.0}
ENVIRONMENT = {
    "command": ["vitpar", "train"],
    "torch": "2.13.0",
    "devices": ["a GPU"],
    "attention": {"backend": "math"},
}


class RunFolders(FileTarget):
    """Folders of runs with and without a pipeline."""

    what = "folders of runs: log, metrics, recipe, plan and environment"
    tokens = (
        b"<script>alert(1)</script>",
        b'"><img src=x onerror=alert(1)>',
        b"</svg>",
        b"&lt;",
        b"NaN",
        b"-Infinity",
        b"1e999",
        b"null",
        b"-1",
        b"999999999999999999999",
        b"[]",
        b"{}",
        b"\n",
        b"start  ",
        b"resuming from ",
    )

    def __init__(self, home: Path) -> None:
        rows = [{"kind": "train", "step": n, "samples": 128 * n, "loss": 2.0 / n, **ROW} for n in range(1, 5)]
        rows.append({"kind": "eval", "step": 4, "samples": 360, "loss": 0.5, "top1": 0.5, "top5": 0.99})
        metrics = "".join(f"{json.dumps(row)}\n" for row in rows)
        self.seeds = []
        for mesh in ("pp2xtp2", "fsdp4"):
            log = "".join((START.format("dp2"), *LINES[:3], START.format(mesh), LINES[3]))
            self.seeds.append(
                {
                    "log.txt": log.encode(),
                    "metrics.jsonl": metrics.encode(),
                    "recipe.toml": RECIPE,
                    "plan.json": plan_text(parse(mesh)).encode(),
                    "env.json": json.dumps(ENVIRONMENT).encode(),
                }
            )
        self.attacks = (_text, _row, _row)

    def read(self, case: Case) -> None:
        refuse_other_folders(case.place)
        html = report([RunRecord(case.place), RunRecord(case.place)])
        if html.count("<script") != 1 or "<img" in html:
            raise oracle.Wrong("a text of the run became an element of the page")
        runs_in(case.place)


def _text(draw: random.Random, files: Files) -> str:
    name = draw.choice(("recipe.toml", "plan.json", "env.json"))
    content = files[name]
    assert isinstance(content, bytes)
    files[name], done = (toml_attack if name.endswith(".toml") else json_attack)(draw, content)
    return f"{name}: {done}"


def _row(draw: random.Random, files: Files) -> str:
    content = files["metrics.jsonl"]
    assert isinstance(content, bytes)
    lines = content.splitlines()
    index = draw.randrange(len(lines))
    lines[index], done = json_attack(draw, lines[index])
    files["metrics.jsonl"] = b"\n".join(lines) + b"\n"
    return f"row {index}: {done}"
