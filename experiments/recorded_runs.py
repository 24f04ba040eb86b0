"""Record ten short runs, and compare them bit by bit with those of another version of the source.

    python experiments/recorded_runs.py before.json
    PYTHONPATH=OTHER/src:OTHER/cli python experiments/recorded_runs.py after.json --beside before.json

Each run trains on scikit-learn's digits for 8 steps on the CPU with `vitpar train`, which takes some minutes in all. It
records losses, gradient norms and validation results. Record both versions on the same machine. With --beside, the exit
code is 1 if any bit differs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STEPS = 8
LAYERWISE = "pp2: embed=fsdp2, 0-1=tp2+sp, *=dp2+zero1"
STREAM = ("train={data}/train-{{000000..000003}}.tar", "val={data}/val-000000.tar", "samples=1437", "val_samples=360")
RUNS: dict[str, tuple[str, ...]] = {
    "dp1": (),
    "pp2xtp2xdp2": ("--mesh", "pp2xtp2xdp2", "--microbatches", "2"),
    "fsdp4+ckpt": ("--mesh", "fsdp4+ckpt", "--set", "model.drop_path=0.1", "--set", "model.dropout=0.1"),
    "tp4+2d": ("--mesh", "tp4+2d", "--set", "train.ema_decay=0.9"),
    "layerwise": ("--mesh", LAYERWISE, "--microbatches", "4"),
    "dp2+zero2, muon": ("--mesh", "dp2+zero2", "--microbatches", "2", "--set", "optimizer.name=muon"),
    "dp2xfsdp2, lamb": ("--mesh", "dp2xfsdp2", "--set", "optimizer.name=lamb", "--set", "augment.mixup=0.8"),
    "fp16": ("--mesh", "dp2", "--precision", "fp16"),
    "stream": ("--mesh", "dp2", *(word for line in (*STREAM, "classes=10") for word in ("--set", f"stream.{line}"))),
}
RESUMED = "tp2, then resumed as fsdp2"


def vitpar(*words: str) -> None:
    """Run a vitpar command; exit with its code if it fails."""
    done = subprocess.run([sys.executable, "-m", "vitpar_cli.main", *words], stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def rows(run: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl without times."""
    kept = ("kind", "step", "loss", "grad_norm", "top1")
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [{key: line[key] for key in kept if key in line} for line in lines]


def record(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Train all runs in `folder` and return their rows by name."""
    data = folder / "data"
    vitpar("data", "pack", "digits", str(data), "--shard-samples", "360")
    recipe = folder / "recipe.toml"
    recipe.write_text(_recipe(data), encoding="utf-8")
    streamed = folder / "streamed.toml"
    streamed.write_text(_recipe(None), encoding="utf-8")
    found = {}
    for number, (name, words) in enumerate(RUNS.items()):
        print(name, file=sys.stderr, flush=True)
        run, file = folder / str(number), streamed if name == "stream" else recipe
        words = tuple(word.format(data=data) if word.startswith("stream.") else word for word in words)
        vitpar("train", "--recipe", str(file), "--device", "cpu", "--run-dir", str(run), *words)
        found[name] = rows(run)
    print(RESUMED, file=sys.stderr, flush=True)
    run = folder / "resumed"
    first = ("--mesh", "tp2", "--steps", str(STEPS // 2))
    vitpar("train", "--recipe", str(recipe), "--device", "cpu", "--run-dir", str(run), *first)
    on = ("--mesh", "fsdp2", "--steps", str(STEPS), "--allow-change", "train.steps", "--device", "cpu")
    vitpar("train", "--resume", str(run), *on)
    found[RESUMED] = rows(run)
    return found


def _recipe(data: Path | None) -> str:
    path = "" if data is None else f'path = "{data}"\n'
    return (
        '[model]\nname = "vit_custom"\nimage_size = 8\npatch_size = 2\nembed_dim = 64\ndepth = 4\n'
        'num_heads = 4\npool = "avg"\n'
        'init = "timm"\n'
        f"[data]\n{path}crop_pct = 1.0\nworkers = 0\n[train]\nbatch_size = 32\nsteps = {STEPS}\nlog_every = 1\n"
        'label_smoothing = 0.1\nprecision = "fp32"\n[optimizer]\nlr = 1e-3\n[lr_schedule]\nwarmup_steps = 2\n'
    )


def main() -> int:
    """Record the runs, compare if --beside is given, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="FILE.json")
    parser.add_argument("--beside", type=Path, metavar="FILE.json", help="what another version recorded")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = record(Path(folder))
    arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if arguments.beside is None:
        return 0
    before = json.loads(arguments.beside.read_text(encoding="utf-8"))
    different = [name for name in {**before, **found} if before.get(name) != found.get(name)]
    for name in {**before, **found}:
        print(f"{name:<28}{'DIFFERENT' if name in different else 'the same'}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
