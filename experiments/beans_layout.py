"""Write data and weights in the layout of Colossal-AI's beans tutorial, at a small size, for a machine without network.

    python experiments/beans_layout.py downloads

``downloads/beans`` has Parquet files as the data set AI-Lab-Makerere/beans on the Hugging Face hub: 48 training and 12
validation images of three made-up leaves. ``downloads/vit`` has the files of google/vit-base-patch16-224 with a small
model of random values.
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from safetensors.numpy import save_file

CLASSES = ("angular_leaf_spot", "bean_rust", "healthy")
SIDE = 500
"""Side of the images, in pixels."""
WIDTH, DEPTH, HEADS = 96, 8, 12
"""Sizes of vit_nano_patch16_224."""


def main() -> None:
    """Read the folder and write both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to write to")
    folder = parser.parse_args().folder
    rng = np.random.default_rng(0)
    (folder / "beans" / "data").mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 48), ("validation", 12)):
        write_parquet(folder / "beans" / "data" / f"{split}-00000-of-00001.parquet", count, rng)
    write_vit(folder / "vit", rng)
    print(f"written    {folder / 'beans'} and {folder / 'vit'}")


def write_parquet(path: Path, count: int, rng: np.random.Generator) -> None:
    """Write `count` images with the columns and the class names of the data set."""
    labels = [number % len(CLASSES) for number in range(count)]
    images = [{"bytes": leaf(label, rng), "path": f"{label}_{number}.jpg"} for number, label in enumerate(labels)]
    table = pa.table({"image_file_path": [one["path"] for one in images], "image": images, "labels": labels})
    features = {"labels": {"names": list(CLASSES), "_type": "ClassLabel"}, "image": {"_type": "Image"}}
    described = json.dumps({"info": {"features": features}})
    pq.write_table(table.replace_schema_metadata({"huggingface": described}), path)


def leaf(label: int, rng: np.random.Generator) -> bytes:
    """Return a JPEG of a green square with spots of the class's colour; healthy leaves have none."""
    pixels = np.full((SIDE, SIDE, 3), (60, 140, 50), np.uint8)
    for _ in range(40 if CLASSES[label] != "healthy" else 0):
        y, x, side = *rng.integers(0, SIDE - 40, 2), rng.integers(10, 40)
        pixels[y : y + side, x : x + side] = ((120, 90, 40), (190, 80, 30))[label]
    noise = rng.integers(-20, 20, pixels.shape)
    file = io.BytesIO()
    Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8)).save(file, "JPEG")
    return file.getvalue()


def write_vit(folder: Path, rng: np.random.Generator) -> None:
    """Write config.json, preprocessor_config.json and model.safetensors of transformers' ViTForImageClassification."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS}
    config = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 224, "patch_size": 16}
    config |= {**sizes, "intermediate_size": 4 * WIDTH, "layer_norm_eps": 1e-12, "hidden_act": "gelu", "qkv_bias": True}
    half = [0.5, 0.5, 0.5]
    images = {"image_processor_type": "ViTImageProcessor", "image_mean": half, "image_std": half, "resample": 2}
    images |= {"size": {"height": 224, "width": 224}, "do_resize": True, "do_rescale": True, "do_normalize": True}
    (folder / "config.json").write_text(json.dumps(config | {"id2label": {n: f"class {n}" for n in range(1000)}}))
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    tensors: dict[str, np.ndarray] = {}

    def linear(name: str, rows: int, columns: int) -> None:
        tensors[f"{name}.weight"] = 0.02 * rng.standard_normal((rows, columns), np.float32)
        tensors[f"{name}.bias"] = np.zeros(rows, np.float32)

    def norm(name: str) -> None:
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = np.ones(WIDTH, np.float32), np.zeros(WIDTH, np.float32)

    for name, tokens in (("cls_token", 1), ("position_embeddings", 197)):
        tensors[f"vit.embeddings.{name}"] = 0.02 * rng.standard_normal((1, tokens, WIDTH), np.float32)
    linear("vit.embeddings.patch_embeddings.projection", WIDTH, 3 * 16 * 16)
    kernel = "vit.embeddings.patch_embeddings.projection.weight"
    tensors[kernel] = tensors[kernel].reshape(WIDTH, 3, 16, 16)
    for number in range(DEPTH):
        block = f"vit.encoder.layer.{number}"
        for part in ("query", "key", "value"):
            linear(f"{block}.attention.attention.{part}", WIDTH, WIDTH)
        linear(f"{block}.attention.output.dense", WIDTH, WIDTH)
        linear(f"{block}.intermediate.dense", 4 * WIDTH, WIDTH)
        linear(f"{block}.output.dense", WIDTH, 4 * WIDTH)
        norm(f"{block}.layernorm_before")
        norm(f"{block}.layernorm_after")
    norm("vit.layernorm")
    linear("classifier", 1000, WIDTH)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    main()
