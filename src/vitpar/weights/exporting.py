"""Export of weights for timm and transformers by their names and configuration files, and of models as ONNX.

ONNX is written by ``torch.onnx`` over ``torch.export``: images to logits, for any number of images.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save
from torch import Tensor, nn

from vitpar.checkpoint.atomic import flush
from vitpar.checkpoint.index import CONFIG, first_line
from vitpar.errors import DataError
from vitpar.models.description import MadeTensor
from vitpar.models.families import config_to_json
from vitpar.models.initial import copy_whole_
from vitpar.models.layers import LayeredModel
from vitpar.weights.folder import Weights, new_folder, write_weights
from vitpar.weights.foreign import FAMILIES
from vitpar.weights.images import image_files, image_settings
from vitpar.weights.shards import listed

Format = Literal["timm", "transformers"]
CLASSIFIER = "classifier.safetensors"
"""File of a classifier that the library's model does not have."""


def export_weights(
    weights: Weights,
    folder: Path,
    format: Format,
    *,
    shard_bytes: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[Path], list[str]]:
    """Write weights to the new `folder` as `format` names them, with the configuration that the library reads.

    timm: ``timm.create_model("local-dir:FOLDER", pretrained=True)``. transformers: ``from_pretrained("FOLDER")``.

    shard_bytes: maximum bytes of tensors in a file; timm's are always in one.
    progress: callback (tensors done, tensors in total).

    Returns the files of tensors that were written, and sentences for the user.

    Raises DataError for a model or parts that the library does not have. Raises CheckpointError for a folder that is
    not empty and if writing fails.
    """
    if weights.config.FAMILY not in FAMILIES and weights.config.pretrained is not None:
        # The model that pretraining was for, with a classifier of zeros.
        config, tensors, whole = *weights.config.pretrained, weights
        weights = Weights(
            weights.folder,
            config,
            lambda name: _made(tensors[name], whole) if name in tensors else torch.zeros(config.shape(name)),
        )
    family = FAMILIES.get(weights.config.FAMILY)
    if family is None:
        raise DataError(
            f"{weights.config.name} is a model of your own, which {format} does not have: use --format vitpar"
        )
    made = family.exported(weights.config, format)
    shapes = weights.config.shapes
    # The refusals of each format list single parts; this covers their combinations.
    used = {name for tensor in (*made.tensors.values(), *made.classifier.values()) for name in tensor.names}
    if other := sorted(used ^ shapes.keys()):
        raise DataError(
            f"no model of {format} has the parts of {weights.config.name} together: it cannot hold {listed(other)}, "
            "so use --format vitpar"
        )
    sizes = {
        name: 4 * sum(torch.Size(shapes[ours]).numel() for ours in tensor.names)
        for name, tensor in made.tensors.items()
    }
    texts = {CONFIG: json.dumps({**made.config, "dtype": "float32"}, indent=1)}
    if size := weights.config.image_size:
        texts = image_files(made.config, image_settings(weights), size, format)
    apart = {name: _made(tensor, weights) for name, tensor in made.classifier.items()}
    classifier = {CLASSIFIER: save(apart)} if apart else {}
    files = write_weights(
        folder,
        sizes,
        lambda name: _made(made.tensors[name], weights),
        others={**texts, **classifier},
        shard_bytes=shard_bytes if format == "transformers" else sum(sizes.values()) + 1,
        plain=True,
        progress=progress,
    )
    return files, list(made.notes)


def _made(tensor: MadeTensor, weights: Weights) -> Tensor:
    return tensor.make(*map(weights.read, tensor.names)).float().contiguous()


ONNX = "model.onnx"
"""File name of the model."""
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
"""Packages of the extra ``onnx``."""
TOLERANCE = 1e-3
"""Largest difference of logits between ONNX Runtime and torch, relative to the largest logit."""


def whole_model(weights: Weights) -> nn.Module:
    """Return the model of `weights` in evaluation mode, on the CPU, in float32."""
    model = LayeredModel(weights.config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            copy_whole_(parameter, weights.read(weights.config.owner(name)))
    for layer in model.layers().values():
        layer.reset_buffers()
    return model.eval().requires_grad_(False)


def export_onnx(weights: Weights, folder: Path) -> float:
    """Write the model to the new `folder` as ``model.onnx``, with config.json, and check it with ONNX Runtime.

    The input ``images`` is float32 [batch, channels, size, size], normalised as in training; the output ``logits`` is
    float32 [batch, classes]. The model's metadata are the `image_settings`, lists as JSON.

    Returns the largest difference of logits between ONNX Runtime and torch, relative to the largest logit.

    Raises DataError if packages of the extra ``onnx`` are missing, or the exported model computes something else.
    Raises CheckpointError for a folder that is not empty and if writing fails.
    """
    if not weights.config.image_size:
        raise DataError(
            f"{weights.config.name} takes token ids, but ONNX is for models of images: use another --format"
        )
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise DataError(f"ONNX needs {', '.join(missing)}: pip install -e '.[onnx]'")
    import onnxruntime

    c = weights.config
    with new_folder(folder) as half:
        metadata = {
            name: value if isinstance(value, str) else json.dumps(value)
            for name, value in image_settings(weights).items()
        }
        model = whole_model(weights)
        shape = (3, c.channels, c.image_size, c.image_size)
        images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        try:
            _export(model, images[:2], metadata, half / ONNX)
        except torch.onnx.OnnxExporterError as problem:
            raise DataError(f"torch cannot export {c.name}: {first_line(problem)}") from None
        (half / CONFIG).write_text(json.dumps(config_to_json(c), indent=1))
        # One image more than the model was exported with.
        session = onnxruntime.InferenceSession(str(half / ONNX), providers=["CPUExecutionProvider"])
        logits = torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])
        expected = model(images)
        error = ((logits - expected).abs().max() / expected.abs().max().clamp(min=1e-6)).item()
        if not error <= TOLERANCE:
            raise DataError(
                f"the exported model gives other logits, which differ by {error:.1e} of the largest, above "
                f"{TOLERANCE:g}: report it with the versions of torch and onnxscript"
            )
    return error


def _export(model: nn.Module, images: Tensor, metadata: Mapping[str, str], path: Path) -> None:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
        program = torch.onnx.export(
            model,
            (images,),
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            dynamo=True,
            verbose=False,
        )
        assert program is not None, "torch.export gives a program"
        program.model.metadata_props.update(metadata)
        # protobuf's limit is 2 GiB.
        program.save(str(path), external_data=sum(p.nbytes for p in model.parameters()) >= 2**30)
    flush(path)
