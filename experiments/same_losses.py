"""Record losses and weights of many short runs, and compare them bit by bit with those of another version.

    python experiments/same_losses.py --json before.json                     # all recorded recipes, a few minutes
    PYTHONPATH=OTHER/src:OTHER/cli python experiments/same_losses.py --json after.json --before before.json

    python experiments/same_losses.py --plans pp2xtp2xdp2 tp2xfsdp2 pp4 dp1 --steps 200 --compare 50 \
        --recipe experiments/cifar10.toml --data data_shards/cifar10

Without --plans, trains RECORDED: every family, schedule, precision, tensor mode, optimizer and augmentation for a few
steps on small data, which it makes. --only names some of them. With --plans, trains the given recipe under each plan,
and prints the largest absolute difference of its losses from those of the last plan, for the first --compare steps and
for all; unknown options (--set, --model, …) are passed to `vitpar train`.

With --before, the exit code is 1 if any bit of a loss, a gradient norm, an evaluation or a weight differs from that
file's: record both on the same machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bench.harness import EXPERIMENTS, Report, parser

DIGITS = f"--recipe {EXPERIMENTS / 'digits.toml'} --batch-size 32 --set lr_schedule.warmup=1"
VIRTUAL = "--set parallel.virtual_stages=2 --microbatches 4"
SMALL = "--set model.embed_dim=32 --set model.depth=2 --set model.num_heads=2"
SQUARES = f"{SMALL} --set model.image_size=32 --set model.patch_size=8 --batch-size 16"
PHOTOS = f"--model vit_custom {SQUARES}"
MAE = f"--task mae --data photos --model mae_custom {SQUARES}"
MAE += " --set model.options.decoder_embed_dim=16 --set model.options.decoder_depth=1"
TEXT = f"--data text {SMALL} --set model.mlp_hidden_dim=64 --batch-size 16"
BERT, T5 = f"--task mlm --model bert_custom {TEXT}", f"--task span --model t5_custom {TEXT}"
SWIN = "--data photos --model swin_custom --set model.image_size=32 --set model.patch_size=4"
SWIN += " --set model.window_size=4"
SWIN += " --set model.embed_dim=16 --set model.depths=[2,2] --set model.num_heads=[2,4] --batch-size 16"
RECORDED = {
    "vit dp1": f"--mesh dp1 {DIGITS}",
    "vit dp2+zero1": f"--mesh dp2+zero1 {DIGITS}",
    "vit dp2+zero2, accumulated": f"--mesh dp2+zero2 --microbatches 2 {DIGITS}",
    "vit fsdp2+ckpt": f"--mesh fsdp2+ckpt {DIGITS}",
    "vit fsdp2+ckpt.selective": f"--mesh fsdp2+ckpt.selective {DIGITS}",
    "vit dp2xfsdp2": f"--mesh dp2xfsdp2 {DIGITS}",
    "vit tp2+sp": f"--mesh tp2+sp {DIGITS}",
    "vit tp4+2d": f"--mesh tp4+2d {DIGITS}",
    "vit tp8+3d": f"--mesh tp8+3d {DIGITS}",
    "vit pp2xtp2xdp2": f"--mesh pp2xtp2xdp2 --microbatches 2 {DIGITS}",
    "vit layerwise": f"--mesh 'pp1: 0-1=tp2, 2-3=fsdp2' {DIGITS}",
    "vit gpipe": f"--mesh pp2 --schedule gpipe --microbatches 4 {DIGITS}",
    "vit interleaved1f1b": f"--mesh pp2 --schedule interleaved1f1b {VIRTUAL} {DIGITS}",
    "vit interleavedzerobubble": f"--mesh pp2 --schedule interleavedzerobubble {VIRTUAL} {DIGITS}",
    "vit zbvzerobubble": f"--mesh pp2 --schedule zbvzerobubble {VIRTUAL} {DIGITS}",
    "vit dualpipev": f"--mesh pp2 --schedule dualpipev {VIRTUAL} {DIGITS}",
    "vit bf16": f"--mesh tp2 --precision bf16 {DIGITS}",
    "vit fp16": f"--mesh dp1 --precision fp16 {DIGITS}",
    "vit fp64": f"--mesh dp1 --precision fp64 {DIGITS}",
    "vit compiled": f"--mesh dp1 --compile {DIGITS}",
    "vit muon, ema, drop-path": (
        f"--mesh fsdp2 --set optimizer.name=muon --set train.ema_decay=0.9 --set model.drop_path=0.2 {DIGITS}"
    ),
    "vit lamb, layer decay": f"--mesh dp2 --set optimizer.name=lamb --set optimizer.layer_decay=0.7 {DIGITS}",
    "vit sgd, frozen": f"--mesh tp2 --set optimizer.name=sgd --set train.freeze=2 {DIGITS}",
    "lora": f"--mesh tp2xdp2 --set lora.rank=2 {DIGITS}",
    "distilled": f"--mesh dp2 --set distill.teacher=runs/0 --set distill.kind=logits {DIGITS}",
    "photos, plain": f"--mesh dp2 --data photos {PHOTOS}",
    "photos, rand-m9, mixup": (
        f"--mesh dp2 --data photos {PHOTOS} --set augment.policy=rand-m9-mstd0.5-inc1 --set augment.mixup=0.8 "
        "--set augment.cutmix=1 --set augment.random_erasing=0.25"
    ),
    "photos, 3-augment, repeats": (
        f"--mesh dp2 --data photos {PHOTOS} --set augment.policy=3a --set augment.color_jitter=0.3 "
        "--set augment.repeats=2 --set data.cache=memory"
    ),
    "photos, AutoAugment, bilinear": (
        f"--mesh dp1 --data photos {PHOTOS} --set augment.policy=original --set data.interpolation=bilinear"
    ),
    "digits on the device, rand-m5": f"--mesh dp2 {DIGITS} --set data.cache=device --set augment.policy=rand-m5",
    "stream": (
        f"--mesh dp1 {PHOTOS} --set stream.train=photos/train-000000.tar --set stream.val=photos/val-000000.tar "
        "--set stream.samples=76 --set stream.val_samples=20 --set stream.classes=4"
    ),
    "swin tp2": f"--mesh tp2 {SWIN}",
    "mae fsdp2": f"--mesh fsdp2 {MAE}",
    "bert pp2": f"--mesh pp2 --microbatches 4 {BERT}",
    "bert tp2": f"--mesh tp2 {BERT}",
    "t5 dp2": f"--mesh dp2 {T5}",
    "t5 tp2+sp": f"--mesh tp2+sp {T5}",
}
"""Options of `vitpar train` by name. `runs/0` is the run of the first."""

Record = dict[str, Any]
"""Result of a run: `steps`, with the loss and gradient norm of each; `evaluations`; and the SHA-256 of `weights`."""


def make_data(folder: Path) -> None:
    """Pack digits, photographs of random colours and sizes, and text of random words."""
    rng, words = np.random.default_rng(0), random.Random(0)
    for number in range(96):
        height, width = rng.integers(24, 64, 2)
        coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
        place = folder / f"images/{number % 4}"
        place.mkdir(parents=True, exist_ok=True)
        coarse.resize((int(width), int(height)), Image.Resampling.BICUBIC).save(place / f"{number}.jpg", quality=90)
    known = ["".join(words.choices("abcdefghij", k=words.randint(2, 8))) for _ in range(200)]
    (folder / "corpus.txt").write_text("\n".join(" ".join(words.choices(known, k=12)) for _ in range(400)))
    for pack in ("digits data_shards/digits", "images photos", "corpus.txt text --tokens 32"):
        run(["data", "pack", *pack.split()], folder)


def run(words: list[str], folder: Path) -> None:
    """Run `vitpar`, and exit if it fails."""
    command = [sys.executable, "-m", "vitpar_cli.main", *words]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(command, stdout=subprocess.DEVNULL, cwd=folder, env=environment, check=False)
    if done.returncode:
        sys.exit(done.returncode)  # the command printed the reason


def trained(name: str, options: list[str], run_dir: Path, folder: Path) -> Record:
    """Train with `options` in `folder`, and return the record."""
    began = time.monotonic()
    run(["train", *options, "--run-dir", str(run_dir), "--set", "train.log_every=1"], folder)
    print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    rows = [*map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())]
    weights = hashlib.sha256()
    for path in sorted((run_dir / "weights").glob("*.safetensors")):
        weights.update(path.read_bytes())
    return {
        "steps": [[row["loss"], row["grad_norm"]] for row in rows if row["kind"] == "train"],
        "evaluations": [[row["step"], row["loss"]] for row in rows if row["kind"] == "eval"],
        "weights": weights.hexdigest(),
    }


def main() -> int:
    """Read the options, train, print the table of losses and return the exit code."""
    made = parser(__doc__)
    made.add_argument("--plans", nargs="+", metavar="PLAN", help="plans of one recipe; the last one is compared with")
    made.add_argument("--only", metavar="REGEX", help="recorded recipes to train, by name")
    made.add_argument("--steps", type=int, default=None, help="default: 200 with --plans, else 3")
    made.add_argument("--compare", type=int, default=50, help="steps the first column looks at")
    made.add_argument("--before", type=Path, metavar="FILE", help="what another version wrote with --json")
    given, options = made.parse_known_args()
    report, steps = Report(given.json), given.steps or (200 if given.plans else 3)
    with tempfile.TemporaryDirectory() as place:
        folder, runs = Path(place), dict[str, Record]()
        if given.plans:
            asked = {plan: ["--mesh", plan, *options] for plan in given.plans}
        else:
            make_data(folder)
            asked = {name: [*shlex.split(words), *options] for name, words in RECORDED.items()}
            asked = {name: words for name, words in asked.items() if re.search(given.only or "", name)}
        for number, (name, words) in enumerate(asked.items()):
            where = Path.cwd() if given.plans else folder
            runs[name] = trained(name, [*words, "--steps", str(steps)], folder / f"runs/{number}", where)
    heads, rows = ["run", "loss at step 1", "at the end"], []
    for name, record in runs.items():
        losses = [loss for loss, _ in record["steps"]]
        rows.append([name, f"{losses[0]:.6f}", f"{losses[-1]:.6f}"])
        if given.plans:
            apart = [abs(a - b) for a, (b, _) in zip(losses, runs[given.plans[-1]]["steps"], strict=True)]
            rows[-1] += [f"{max(apart[: given.compare]):.1e}", f"{max(apart):.1e}"]
    heads += [f"apart in {given.compare} steps", f"in all {steps}"] if given.plans else []
    report.show("runs", heads, rows, runs)
    before = json.loads(given.before.read_text())["runs"] if given.before else runs
    different = [name for name, record in runs.items() if before.get(name) != record]
    print("".join(f"{name}: not the same as before\n" for name in different), end="")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
