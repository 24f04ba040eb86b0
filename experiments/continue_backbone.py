"""Continue a backbone without labels: neighbours before and after, by settings.

    vitpar data pack PATH/TO/cifar10 data_shards/cifar10
    python experiments/continue_backbone.py data_shards/cifar10 runs/continued --json continued.json

A ViT learns half of CIFAR-10's classes with labels. It is exported in timm's format, imported again, and trained
without labels on 10,000 images of all classes: by vitpar's settings for continuing (three seeds), and by those for
training from scratch (three seeds). The same model learns the same images from scratch, by self-distillation and by
masked autoencoding. Each result is the accuracy of 20 nearest neighbours.

Killed, the same command resumes: what is finished is kept in the folder, and a training continues from its newest
checkpoint. One core, threads by OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.harness import Report, parser
from bench.json_file import read_json, write_json
from vitpar.data.shards.shard_set import ShardSet

KNOWN = 5
"""Classes with labels for the backbone: the first ones."""
UNLABELLED = 10_000
"""Images of all classes that are learned without labels."""
IMAGES = {"train": 5_000, "val": 2_000}
"""Neighbours, and images that they classify, of all classes."""
SIZES = {"image_size": 32, "patch_size": 4, "embed_dim": 128, "depth": 3, "num_heads": 4}
"""Sizes of the model: 0.6 M parameters."""
CROPS = {"local_crops": 2, "local_size": 16, "head_hidden_dim": 256, "head_bottleneck_dim": 64}
"""Local crops and heads."""
DINO = {
    **{f"model.options.{key}": value for key, value in CROPS.items()},
    "task.options.prototypes": 1024,
    "task.options.local_crops_scale": "[0.1,0.4]",
}
"""Settings of self-distillation that are smaller than the defaults, for images of 32 pixels."""
DECODER = {f"model.options.decoder_{key}": value for key, value in (("embed_dim", 64), ("depth", 2), ("num_heads", 2))}
"""Settings of the masked autoencoder."""
COLORS = {"data.mean": "[0.491,0.482,0.447]", "data.std": "[0.247,0.243,0.262]", "data.crop_pct": 1.0}
SCRATCH_RATE = {"task.options.backbone_rate": 1, "task.options.heads_first": 0}
"""Settings that give a continued backbone the rate of a training from scratch, from the first step on."""


def settings(values: dict[str, Any]) -> list[str]:
    """Return options of the command line."""
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


def arms(seeds: int) -> dict[str, tuple[str, ...]]:
    """Return options of `vitpar train` by the name of the training, whose last word is a seed."""
    continued = ("--task", "dino", "--weights", "weights/imported")
    named = {
        "safe": (continued, DINO),
        "scratch-rate": (continued, {**DINO, **SCRATCH_RATE}),
        "from-scratch": (("--task", "dino", "--model", "dino_vit_custom"), {**DINO, **sized()}),
        "mae": (("--task", "mae", "--model", "mae_custom"), {**sized(), **DECODER}),
    }
    both = [(name, seed) for seed in range(seeds) for name in ("safe", "scratch-rate")]
    return {
        f"{name}-{seed}": (*named[name][0], *settings({**named[name][1], "train.seed": seed}))
        for name, seed in (*both, ("from-scratch", 0), ("mae", 0))
    }


def sized() -> dict[str, Any]:
    """Return the settings of the model's sizes."""
    return {f"model.{key}": value for key, value in SIZES.items()}


class Experiment:
    """The trainings in one folder, which remembers those that are finished.

    folder: place of data, runs, weights and results. source: packed CIFAR-10.
    """

    def __init__(self, folder: Path, source: Path) -> None:
        self.folder, self.source = folder, source.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "results.json"
        self.results: dict[str, Any] = read_json(self._file) or {}

    def once(self, name: str, make: Any) -> Any:
        """Return the result of `make`, which is called unless an earlier call with the name finished."""
        if name not in self.results:
            began = time.monotonic()
            self.results[name] = made = make()
            print(f"{name}: {made}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            write_json(self._file, self.results)
        return self.results[name]

    def vitpar(self, *words: str) -> str:
        """Run a command in the folder and return what it prints. Raises CalledProcessError if it fails."""
        command = [sys.executable, "-m", "vitpar_cli.main", *words]
        return subprocess.run(command, cwd=self.folder, check=True, stdout=subprocess.PIPE, text=True).stdout

    def pack(self, name: str, classes: int, most: dict[str, int]) -> str:
        """Pack images of the first classes of the source, equally many of each and `most` of a split in all."""
        place = self.folder / "images" / name
        for split, number in most.items():
            images = ShardSet.open(self.source, split)
            left = [number // classes] * classes
            for i in range(len(images)):
                label = images.label(i)
                if label < classes and left[label]:
                    left[label] -= 1
                    path = place / split / images.classes[label].replace("/", "_") / f"{i}.jpg"
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(images.read(i))
        no_val = () if "val" in most else ("--val-fraction", "0")
        self.vitpar("data", "pack", f"images/{name}", f"data/{name}", *no_val, "--overwrite")
        return f"data/{name}"

    def train(self, name: str, data: str, *words: str) -> list[int]:
        """Train, from the newest checkpoint if there is one; return the steps at which it was started."""
        run = self.folder / "runs" / name
        found = [int(path.name.removeprefix("step_")) for path in run.glob("checkpoints/step_*[0-9]")]
        begins = self.results.setdefault(f"begins of {name}", [])
        begins.append(max(found, default=0))
        write_json(self._file, self.results)
        options = {**COLORS, "checkpoint.every": 50, "data.workers": 0}
        common = ("--mesh", "dp1", "--data", data, "--run-dir", f"runs/{name}", "--resume", "auto")
        self.vitpar("train", *words, *common, *settings(options))
        return begins

    def neighbours(self, checkpoint: str) -> float:
        """Return the accuracy of 20 nearest neighbours."""
        for split in IMAGES:
            place = ("--data", "data/neighbours", "--data-split", split)
            self.vitpar("features", *place, "--checkpoint", checkpoint, "--out", f"{split}.parquet")
        words = ("train.parquet", "val.parquet", "--neighbours", "20", "--epochs", "1", "--json")
        top1: float = json.loads(self.vitpar("probe", *words))["neighbours"][0]["top1"]
        return top1


def main() -> int:
    """Read the options, train what is not finished, print the table and return the exit code."""
    made = parser(__doc__)
    made.add_argument("data", type=Path, help="folder of packed CIFAR-10")
    made.add_argument("folder", type=Path, help="folder of the experiment's data, runs and results")
    made.add_argument("--steps", type=int, default=256, help="steps without labels, of --batch-size images")
    made.add_argument("--batch-size", type=int, default=16)
    made.add_argument("--backbone-epochs", type=int, default=2, help="epochs with labels")
    made.add_argument("--seeds", type=int, default=3)
    given = made.parse_args()
    report, run = Report(given.json), Experiment(given.folder, given.data)
    run.once("data/known", lambda: run.pack("known", KNOWN, {"train": 22_500}))
    run.once("data/unlabelled", lambda: run.pack("unlabelled", 10, {"train": UNLABELLED}))
    run.once("data/neighbours", lambda: run.pack("neighbours", 10, IMAGES))
    words = ("--model", "vit_custom", *settings(sized()), "--batch-size", "128", "--epochs", str(given.backbone_epochs))
    run.once("train backbone", lambda: run.train("backbone", "data/known", *words))
    words = ("runs/backbone", "--format", "timm", "--out", "weights/timm")
    run.once("export", lambda: run.vitpar("checkpoint", "export", *words).strip())
    words = ("weights/timm", "--out", "weights/imported")
    run.once("import", lambda: run.vitpar("checkpoint", "import", *words).strip())
    rows = [["backbone", f"{run.once('before', lambda: run.neighbours('weights/imported')):.1%}", ""]]
    length = ("--batch-size", str(given.batch_size), "--steps", str(given.steps))
    for name, options in arms(given.seeds).items():
        begins = run.once(f"train {name}", lambda n=name, o=options: run.train(n, "data/unlabelled", *o, *length))
        after = run.once(name, lambda n=name: run.neighbours(f"runs/{n}"))
        rows.append([name, f"{after:.1%}", ", ".join(map(str, begins))])
    report.show("accuracy of 20 nearest neighbours", ["training", "top-1", "started at step"], rows, run.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
