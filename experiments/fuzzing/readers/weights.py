"""Targets: weights of other libraries, as safetensors with configurations and as pickles that must not run."""

import argparse
import io
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from fuzzing import oracle
from fuzzing.case import Case, Files, Target, read_folder
from fuzzing.edits import join_zip, split_zip
from fuzzing.hostile import WHOLE_PICKLES
from helpers.foreign_weights import TIMM_CONFIG, as_transformers, timm_state, transformers_config
from vitpar.models import model_config
from vitpar.models.lora import adapted
from vitpar.weights.adapters import SETTINGS, adapter_files, read_adapters
from vitpar.weights.folder import open_weights
from vitpar.weights.importing import import_weights
from vitpar.weights.sources import open_source

PARTS, CONFIG, IMAGES = "model.safetensors.index.json", "config.json", "preprocessor_config.json"


class Weights(Target):
    """Safetensors and config.json of timm, transformers and vitpar, imported."""

    def make(self, home: Path) -> None:
        face, config = as_transformers(timm_state()), json.dumps(transformers_config()).encode()
        parts = {f"model-0000{half + 1}-of-00002.safetensors": dict([*face.items()][half::2]) for half in range(2)}
        places = {"weight_map": {name: file for file, part in parts.items() for name in part}}
        self.seeds = [
            {"model.safetensors": save(timm_state()), CONFIG: json.dumps(TIMM_CONFIG).encode()},
            {"model.safetensors": save(face), CONFIG: config},
            {PARTS: json.dumps(places).encode(), CONFIG: config, IMAGES: b'{"image_mean": [0.5, 0.5, 0.5]}'},
        ]
        self.seeds[2] |= {name: save(part) for name, part in parts.items()}
        Case(self.seeds[1]).write(home / "there")
        import_weights(home / "there", home / "imported")
        self.seeds.append(read_folder(home / "imported"))
        own = self.seeds[3][PARTS]
        self.names = [*json.loads(own)["weight_map"]]
        images = {"image_mean": [10**400] * 3, "image_std": [float("nan"), 1, 1], "resample": [2]}
        absurd = [{name: 10**9} for name in ("hidden_size", "image_size", "patch_size")] + [{"model_type": "x" * 10**6}]
        configs = [json.dumps(transformers_config(**changed)).encode() for changed in absurd]
        changes: list[tuple[int, Files]] = [
            *((1, {CONFIG: text}) for text in (*configs, b"[" * 100_000, b"\xff", b"[1]")),
            (2, {IMAGES: json.dumps(images).encode()}),
            (3, {PARTS: own.replace(b"model-00001", b"../there/model-00001")}),
        ]
        self.triggers = [self.case(*change) for change in changes]

    def read(self, case: Case, place: Path) -> None:
        if case.seed == 3:
            weights = open_weights(place)
            for name in self.names:
                weights.read(name)
            return
        done = import_weights(place, place / "out" / "imported")
        again = open_weights(place / "out" / "imported")
        if again.config != done.config:
            raise oracle.Wrong(f"what was imported reads as {again.config} instead of {done.config}")


class Pickle(Target):
    """Files of torch.save, and pickles that run programs, read without trust."""

    def make(self, home: Path) -> None:

        def saved(value: object, **options: Any) -> bytes:
            file = io.BytesIO()
            torch.save(value, file, **options)
            return file.getvalue()

        run = {"model": timm_state(), "epoch": 3, "args": argparse.Namespace(lr=0.1, name="x")}
        self.seeds = [
            {"weights.pt": saved(timm_state())},
            {"pytorch_model.bin": saved(run), CONFIG: json.dumps(TIMM_CONFIG).encode()},
            {"weights.pt": saved(timm_state(), _use_new_zipfile_serialization=False)},
        ]
        entries = {part.partition(b"\0")[0]: part for part in split_zip(self.seeds[0]["weights.pt"])}
        name = next(name for name in entries if name.endswith(b"data.pkl"))
        inside = [join_zip([*(entries | {name: name + b"\0" + data}).values()]) for data in WHOLE_PICKLES]
        self.pieces = (*inside, *WHOLE_PICKLES)
        self.triggers = [self.case(0, {"weights.pt": data}) for data in self.pieces]

    def read(self, case: Case, place: Path) -> None:
        source = open_source(place if case.seed == 1 else place / "weights.pt")
        for tensor in source.shapes:
            source.read(tensor)


class Adapters(Target):
    """Files of peft by vitpar's and timm's names, read into a model with adapters."""

    def make(self, home: Path) -> None:
        base = model_config("vit_custom", image_size=8, patch_size=4, embed_dim=8, depth=1, num_heads=2, num_classes=3)
        self.config = adapted(base, 2, 4.0)
        shapes = {f"{layer.name}.{n}": s for layer in self.config.layers.values() for n, s in layer.parameters.items()}
        tensors = {name: torch.ones(shape) for name, shape in shapes.items()}
        self.seeds = []
        for library in (None, "timm"):
            files = adapter_files(self.config, tensors.__getitem__, ("head.fc.weight", "head.fc.bias"), library)
            self.seeds.append({n: c.encode() if isinstance(c, str) else c for n, c in files.items()})
        said = json.loads(self.seeds[0][SETTINGS])
        changed = [{"r": 10**9}, {"r": 0}, {"lora_alpha": 1e308}, {"rank_pattern": {"x" * 10**6: 1}}, {"peft_type": 3}]
        texts = [json.dumps(said | one).encode() for one in changed]
        texts += [said_twice.encode() for said_twice in ("[" * 100_000, '{"r": NaN, "peft_type": "LORA"}')]
        self.triggers = [self.case(0, {SETTINGS: text}) for text in texts]

    def read(self, case: Case, place: Path) -> None:
        for name, tensor in read_adapters(place, self.config).items():
            if tuple(tensor.shape) != self.config.shape(name):
                raise oracle.Wrong(f"{name} is read with shape {list(tensor.shape)}")
