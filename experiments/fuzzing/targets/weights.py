"""Targets: weights of other libraries, as safetensors with configurations and as pickles that must not run."""

from __future__ import annotations

import argparse
import io
import json
import random
import re
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save

from fuzzing import oracle
from fuzzing.attacks import pickles, tensors, zips
from fuzzing.attacks.jsons import json_attack
from fuzzing.target import Case, Files, FileTarget, read_folder
from vitpar.weights.folder import open_weights
from vitpar.weights.importing import import_weights
from vitpar.weights.sources import open_source

WIDTH, HEADS, CLASSES = 8, 2, 3
TIMM = {"architecture": "vit_none", "model_args": {"num_heads": HEADS}}
HUGGING_FACE = {
    "model_type": "vit",
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 1,
    "image_size": 8,
    "patch_size": 4,
    "architectures": ["ViTForImageClassification"],
}


def timm_state() -> dict[str, torch.Tensor]:
    """Return the parameters of a tiny ViT under timm's names."""
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"cls_token": (1, 1, WIDTH), "pos_embed": (1, 5, WIDTH)}
    shapes |= {"patch_embed.proj.weight": (WIDTH, 3, 4, 4), "patch_embed.proj.bias": (WIDTH,)}
    layers = {
        "attn.qkv": (3 * WIDTH, WIDTH),
        "attn.proj": (WIDTH, WIDTH),
        "mlp.fc1": (16, WIDTH),
        "mlp.fc2": (WIDTH, 16),
    }
    for name, shape in layers.items():
        shapes |= {f"blocks.0.{name}.weight": shape, f"blocks.0.{name}.bias": shape[:1]}
    for name in ("blocks.0.norm1", "blocks.0.norm2", "norm"):
        shapes |= {f"{name}.weight": (WIDTH,), f"{name}.bias": (WIDTH,)}
    shapes |= {"head.weight": (CLASSES, WIDTH), "head.bias": (CLASSES,)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def hugging_face_state() -> dict[str, torch.Tensor]:
    """Return the same parameters under transformers' names."""
    names = {
        "patch_embed.proj": "vit.embeddings.patch_embeddings.projection",
        "norm": "vit.layernorm",
        "head": "classifier",
    }
    names |= {"cls_token": "vit.embeddings.cls_token", "pos_embed": "vit.embeddings.position_embeddings"}
    block = "vit.encoder.layer.0."
    names |= {"blocks.0.norm1": f"{block}layernorm_before", "blocks.0.norm2": f"{block}layernorm_after"}
    names |= {"blocks.0.attn.proj": f"{block}attention.output.dense", "blocks.0.mlp.fc1": f"{block}intermediate.dense"}
    names |= {"blocks.0.mlp.fc2": f"{block}output.dense"}
    found = {}
    for name, tensor in timm_state().items():
        stem, _, end = name.rpartition(".")
        if stem == "blocks.0.attn.qkv":
            for part, third in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                found[f"{block}attention.attention.{part}.{end}"] = third.clone()
        else:
            found[f"{names[stem]}.{end}" if stem in names else names[name]] = tensor
    return found


class Weights(FileTarget):
    """Safetensors of timm, transformers and vitpar, with their JSON files."""

    what = "safetensors and config.json of timm, transformers and vitpar, imported"
    tokens = (
        b"F32",
        b"data_offsets",
        b"[0,0]",
        b"null",
        b"-1",
        b"1e999",
        b"blocks.0",
        b"weight_map",
        b"\\ud800",
        b"{}",
    )

    def __init__(self, home: Path) -> None:
        timm, face = timm_state(), hugging_face_state()
        halves = [dict(list(face.items())[half::2]) for half in range(2)]
        parts = {f"model-0000{half + 1}-of-00002.safetensors": part for half, part in enumerate(halves)}
        places = {name: file for file, part in parts.items() for name in part}
        self.seeds = [
            {"model.safetensors": save(timm), "config.json": json.dumps(TIMM).encode()},
            {"model.safetensors": save(face), "config.json": json.dumps(HUGGING_FACE).encode()},
            {name: save(part) for name, part in parts.items()}
            | {"model.safetensors.index.json": json.dumps({"metadata": {}, "weight_map": places}).encode()}
            | {
                "config.json": json.dumps(HUGGING_FACE).encode(),
                "preprocessor_config.json": b'{"image_mean": [0.5, 0.5, 0.5]}',
            },
        ]
        for name, content in self.seeds[1].items():
            (home / name).write_bytes(content)
        import_weights(home, home / "imported") if not (home / "imported").exists() else None
        self.seeds.append(read_folder(home / "imported"))
        self.attacks = (_tensor_file, _tensor_file, _json, _json, _json)

    def read(self, case: Case) -> None:
        if case.seed == 3:
            weights = open_weights(case.place)
            names = json.loads(self.seeds[3]["model.safetensors.index.json"])["weight_map"]
            for name in names:
                weights.read(name)
            return
        done = import_weights(case.place, case.place / "out" / "imported")
        again = open_weights(case.place / "out" / "imported")
        if again.config != done.config:
            raise oracle.Wrong(f"what was imported reads as {again.config} instead of {done.config}")


def _content(files: Files, name: str) -> bytes:
    content = files[name]
    assert isinstance(content, bytes)
    return content


def _tensor_file(draw: random.Random, files: Files) -> str:
    name = draw.choice([name for name in sorted(files) if name.endswith(".safetensors")])
    files[name], words = tensors.attack(draw, _content(files, name))
    return f"{name}: {words}"


def _json(draw: random.Random, files: Files) -> str:
    name = draw.choice([name for name in sorted(files) if name.endswith(".json")])
    files[name], words = json_attack(draw, _content(files, name))
    return f"{name}: {words}"


class Pickles(FileTarget):
    """Files of torch.save, and hostile pickles under their names."""

    what = "files of torch.save, and pickles that run programs, read without trust"
    tokens = (
        b"c",
        b"R",
        b".",
        b"(",
        b"t",
        b"}",
        b"q\0",
        b"h\0",
        b"K\xff",
        b"ctorch\nload\n",
        b"cos\nsystem\n",
        b"PK\1\2",
    )

    def __init__(self, home: Path) -> None:
        state = timm_state()
        run = {"model": state, "epoch": 3, "args": argparse.Namespace(lr=0.1, name="x")}
        self.seeds = [
            {"weights.pt": _saved(state)},
            {"pytorch_model.bin": _saved(run), "config.json": json.dumps(TIMM).encode()},
            {"weights.pt": _saved_as_before(state)},
            {"weights.pth": _saved({name: tensor.half() for name, tensor in state.items()})},
        ]
        self.attacks = (_pickle, _pickle, _pickle, _alone, _zip)

    def read(self, case: Case) -> None:
        name = next((name for name in case.files if name.startswith("weights.")), None)
        try:
            source = open_source(case.place / name if name else case.place)
            for tensor in source.shapes:
                source.read(tensor)
        finally:
            for place in (case.place / "hostile", Path("hostile")):
                if place.exists():
                    place.unlink()
                    raise oracle.Wrong("a pickle ran a program")


def _saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _saved_as_before(state: dict[str, torch.Tensor]) -> bytes:
    """Return the parameters in the format of torch.save before zip files.

    It names storages by their addresses, which differ every time: all parameters share one storage, which is renamed.
    """
    flat = torch.cat([tensor.flatten() for tensor in state.values()])
    parts = flat.split([tensor.numel() for tensor in state.values()])
    whole = {name: part.view(tensor.shape) for part, (name, tensor) in zip(parts, state.items(), strict=True)}
    file = io.BytesIO()
    torch.save(whole, file, _use_new_zipfile_serialization=False)
    return re.sub(rb"X.\0\0\0[0-9]{9,20}q", pickles.text("1234567890") + b"q", file.getvalue(), flags=re.DOTALL)


def _name(files: Files) -> str:
    return next(name for name in sorted(files) if not name.endswith(".json"))


def _pickle(draw: random.Random, files: Files) -> str:
    """Replace data.pkl in a file of torch.save, or numbers in it."""
    name = _name(files)
    data = _content(files, name)
    if not data.startswith(b"PK"):
        files[name], words = pickles.renumbered(draw, data)
        return f"{name}: {words}"
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    inside = next(entry for entry in entries if entry.endswith("data.pkl"))
    change = draw.random()
    if change < 0.35:
        entries[inside], words = pickles.hostile(draw)
    elif change < 0.85:
        entries[inside], words = pickles.renumbered(draw, entries[inside])
    else:
        other = draw.choice(sorted(entries))
        entries[other], words = draw.choice((b"", entries[other] + b"\0", b"big", entries[other][:-1])), other
    files[name] = zips.packed(entries.items(), zipfile.ZIP_STORED)
    return f"{name}: {words}"


def _alone(draw: random.Random, files: Files) -> str:
    name = _name(files)
    files[name], words = pickles.hostile(draw)
    return f"{name}: {words}"


def _zip(draw: random.Random, files: Files) -> str:
    name = _name(files)
    data = _content(files, name)
    if not data.startswith(b"PK"):
        return _alone(draw, files)
    files[name], words = zips.attack(draw, data)
    return f"{name}: {words}"
