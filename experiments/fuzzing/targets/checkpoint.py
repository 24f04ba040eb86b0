"""Target: folders of checkpoints."""

from __future__ import annotations

import json
import random
import zlib
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from fuzzing import oracle
from fuzzing.attacks import tensors
from fuzzing.attacks.binary import small
from fuzzing.attacks.jsons import json_attack
from fuzzing.target import Case, Files, FileTarget, Refused, read_folder, tolerated
from vitpar.checkpoint import Checkpoint, Facts, Writer, load_tensors
from vitpar.checkpoint.folder import BestEvaluation
from vitpar.checkpoint.index import CONFIG, INDEX, PLAN, RECIPE, STATE, Index
from vitpar.checkpoint.reader import read_whole
from vitpar.models import ViTConfig
from vitpar.models.layers import LayeredModel
from vitpar.strategy import Plan
from vitpar.strategy.plan_json import plan_text
from vitpar.weights.folder import open_weights

TINY = ViTConfig(
    "vit_tiny", patch_size=4, embed_dim=8, depth=1, num_heads=2, mlp_hidden_dim=16, image_size=8, num_classes=3
)
TOML = '[model]\nname = "vit_tiny"\n[data]\npath = "data"\n[train]\nsteps = 5\n'


class CheckpointFolder(FileTarget):
    """A checkpoint as one process writes it."""

    what = "the folder of a checkpoint: its index, its state, its files of tensors"
    tokens = (b"F32", b"data_offsets", b"[0,0]", b"null", b"-1", b"1e999", b'"shape":[', b"bfloat16", b"\\ud800", b"{}")

    def __init__(self, home: Path) -> None:
        draw = torch.Generator().manual_seed(0)
        shapes = {f"model.{name}": value.shape for name, value in LayeredModel(TINY).named_parameters()}
        model = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
        state = {name.replace("model.", "optimizer.exp_avg."): value.bfloat16() for name, value in model.items()}
        self._tensors = model | state | {"rng": torch.arange(9, dtype=torch.uint8), "count": torch.tensor(5)}
        facts = Facts(step=5, samples=40, data="abc", best=BestEvaluation(step=4, top1=0.5))
        texts = {
            STATE: facts.model_dump_json(),
            RECIPE: TOML,
            PLAN: plan_text(Plan()),
            CONFIG: json.dumps(asdict(TINY)),
        }
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            writer = Writer()
            writer.begin(home / "step_5", self._tensors, texts)
            writer.finish()
        finally:
            dist.destroy_process_group()
        self.seeds = [read_folder(home / "step_5")]
        self.attacks = (_index, _index, _index, _state, _config, _tensor_file, _tensor_file, _gone)

    def read(self, case: Case) -> None:
        checkpoint = Checkpoint.open(case.place)
        wrong = checkpoint.damage()
        told = None if wrong is None else Refused(wrong)
        sealed = INDEX in case.changed
        if told is None and case.changed & {*checkpoint.index.files} and not sealed:
            raise oracle.Wrong(f"damage() is silent on {sorted(case.changed)[0]}, which is not what was written")
        # Reading without calling damage() first must be safe too.
        right = True
        for name in list(checkpoint.index.tensors)[:200]:
            found = tolerated(partial(read_whole, checkpoint, name))
            right &= found is None or name not in self._tensors or _same(found, self._tensors[name])
        wanted = {name: torch.full_like(tensor, 7) for name, tensor in self._tensors.items()}
        loaded = tolerated(lambda: load_tensors(case.place, wanted, checkpoint.index) or True)
        right &= loaded is None or all(_same(wanted[name], tensor) for name, tensor in self._tensors.items())
        weights = tolerated(lambda: open_weights(case.place))
        for name in [name for name, _ in LayeredModel(TINY).named_parameters()] if weights else ():
            tolerated(partial(weights.read, name))
        if told is not None:
            raise told
        if not right and not sealed:
            raise oracle.Wrong("a tensor is not what was written, and nothing is said")


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())


def _content(files: Files, name: str) -> bytes:
    content = files[name]
    assert isinstance(content, bytes)
    return content


def seal(files: Files, text: bytes) -> None:
    """Write `text` as the index, with a recomputed checksum if it is a valid index."""
    try:
        index = Index.model_validate_json(text)
        index.crc32 = index.checksum
        text = index.model_dump_json().encode()
    except Exception:  # not a valid index: write it as it is
        pass
    files[INDEX] = text


def _index(draw: random.Random, files: Files) -> str:
    text, words = json_attack(draw, _content(files, INDEX))
    if draw.random() < 0.8:
        seal(files, text)
        return f"{INDEX}, sealed: {words}"
    files[INDEX] = text
    return f"{INDEX}: {words}"


def _state(draw: random.Random, files: Files) -> str:
    files[STATE], words = json_attack(draw, _content(files, STATE))
    return _known(draw, files, STATE, words)


def _config(draw: random.Random, files: Files) -> str:
    name = draw.choice((CONFIG, PLAN))
    files[name], words = json_attack(draw, _content(files, name))
    return _known(draw, files, name, words)


def _tensor_file(draw: random.Random, files: Files) -> str:
    name = next(name for name in sorted(files) if name.endswith(".safetensors"))
    change = tensors.attack if draw.random() < 0.6 else small
    files[name], words = change(draw, _content(files, name))
    return _known(draw, files, name, words)


def _gone(draw: random.Random, files: Files) -> str:
    name = draw.choice(sorted(files))
    del files[name]
    return f"{name} is gone"


def _known(draw: random.Random, files: Files, name: str, words: str) -> str:
    """Update size and checksum of a changed file in the index, in half of the cases; return a description."""
    if draw.random() < 0.5:
        return f"{name}: {words}"
    content = _content(files, name)
    index = json.loads(_content(files, INDEX))
    index["files"][name] = {"bytes": len(content), "crc32": zlib.crc32(content)}
    seal(files, json.dumps(index).encode())
    return f"{name}, sealed: {words}"
