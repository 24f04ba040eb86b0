"""Target: folders of checkpoints."""

import json
import zlib
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fuzzing import oracle
from fuzzing.case import Case, Files, Target, read_folder
from fuzzing.oracle import tolerated
from vitpar import checkpoint
from vitpar.checkpoint.folder import BestEvaluation
from vitpar.checkpoint.index import CONFIG, INDEX, PLAN, RECIPE, STATE, Index
from vitpar.checkpoint.reader import read_whole
from vitpar.errors import CheckpointError
from vitpar.models import ViTConfig
from vitpar.models.layers import LayeredModel
from vitpar.strategy import Plan
from vitpar.strategy.plan_json import plan_text
from vitpar.weights.folder import open_weights

TINY = ViTConfig(
    "vit_tiny", patch_size=4, embed_dim=8, depth=1, num_heads=2, mlp_hidden_dim=16, image_size=8, num_classes=3
)
TOML = '[model]\nname = "vit_tiny"\n[data]\npath = "data"\n[train]\nsteps = 5\n'
ONE: dict[str, Any] = {"dtype": "float32", "shape": [2], "parts": [[0, [0], [2]]]}
TENSORS: tuple[dict[str, Any], ...] = (
    *({"x": ONE | {"parts": [[0, [0], [1]]] * 65_537}}, {str(i): 1 for i in range(10**5)}, {"y" * 10**6: ONE}),
    *({"x": ONE | {"shape": [n] * d, "parts": [[0, [0] * d, [n] * d]]}} for n, d in ((1, 32), (2**62, 2), (10**12, 1))),
)
CLAIMS = (
    *({"tensors": tensors} for tensors in TENSORS),
    *({"shards": [name]} for name in ("../" + "y" * 10**6, "a\0b", "/etc/passwd", "..")),
    {f"k{i}": 1 for i in range(10**5)},
)
"""Entries of an index that once used much memory or time, or made long messages."""


class Checkpoint(Target):
    """The folder of a checkpoint: its index, its state, its files of tensors."""

    def make(self, home: Path) -> None:
        draw, parameters = torch.Generator().manual_seed(0), dict(LayeredModel(TINY).named_parameters())
        self.names, self.tensors = [*parameters], dict[str, torch.Tensor]()
        for name, value in parameters.items():
            self.tensors[f"model.{name}"] = whole = torch.randn(value.shape, generator=draw)
            self.tensors[f"optimizer.exp_avg.{name}"] = whole.bfloat16()
        self.tensors |= {"rng": torch.arange(9, dtype=torch.uint8), "count": torch.tensor(5)}
        facts = checkpoint.Facts(step=5, samples=40, data="abc", best=BestEvaluation(step=4, top1=0.5))
        config = json.dumps(asdict(TINY))
        texts = {STATE: facts.model_dump_json(), RECIPE: TOML, PLAN: plan_text(Plan()), CONFIG: config}
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            writer = checkpoint.Writer()
            writer.begin(home / "step_5", self.tensors, texts)
            writer.finish()
        finally:
            dist.destroy_process_group()
        self.seeds, self.triggers = [read_folder(home / "step_5")], []
        for change in CLAIMS:
            files = {INDEX: json.dumps(json.loads(self.seeds[0][INDEX]) | change).encode()}
            self.seal(files)
            self.triggers.append(self.case(0, files, sealed=True))

    def seal(self, files: Files) -> bool:
        """Correct sizes and checksums of files in the index, and the checksum of the index."""
        try:
            index = json.loads(files[INDEX])
            for name in files.keys() & index["files"]:
                index["files"][name] = {"bytes": len(files[name]), "crc32": zlib.crc32(files[name])}
            sealed = Index.model_validate(index)
            sealed.crc32 = sealed.checksum
            files[INDEX] = sealed.model_dump_json().encode()
        except (ValueError, TypeError, KeyError, RecursionError):  # an edit broke the index
            return False
        return True

    def read(self, case: Case, place: Path) -> None:
        found = checkpoint.Checkpoint.open(place)
        wrong = found.damage()
        sealed = INDEX in case.changed
        if wrong is None and case.changed & {*found.index.files} and not sealed:
            raise oracle.Wrong("damage() is silent on a file that is not what was written")
        # Reading without calling damage() first must be safe too.
        right = True
        for name in list(found.index.tensors)[:200]:
            tensor = tolerated(partial(read_whole, found, name))
            right &= tensor is None or name not in self.tensors or same(tensor, self.tensors[name])
        wanted = {name: torch.full_like(tensor, 7) for name, tensor in self.tensors.items()}
        loaded = tolerated(lambda: checkpoint.load_tensors(place, wanted, found.index) or True)
        right &= loaded is None or all(same(wanted[name], tensor) for name, tensor in self.tensors.items())
        weights = tolerated(lambda: open_weights(place))
        for name in self.names if weights else ():
            tolerated(partial(weights.read, name))
        if wrong is not None:
            raise CheckpointError(wrong)
        if not right and not sealed:
            raise oracle.Wrong("a tensor is not what was written, and nothing is said")


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are equal in type, shape and content."""
    return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
