"""Export of a model as ONNX, by ``torch.onnx`` over ``torch.export``: images to logits, for any number of images."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from vitpar.checkpoint.atomic import flush
from vitpar.checkpoint.index import CONFIG, first_line
from vitpar.errors import DataError
from vitpar.models.families import config_to_json
from vitpar.models.initial import copy_whole_
from vitpar.models.layers import LayeredModel
from vitpar.weights.folder import Weights, new_folder
from vitpar.weights.images import image_settings

FILE = "model.onnx"
"""File name of the model."""
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
"""Packages of the extra ``onnx``."""
TOLERANCE = 1e-3
"""Largest difference of logits between ONNX Runtime and torch, relative to the largest logit."""
_IMAGES = 2


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
    c = weights.config
    with new_folder(folder) as half:
        metadata = {
            name: value if isinstance(value, str) else json.dumps(value)
            for name, value in image_settings(weights).items()
        }
        model = whole_model(weights)
        shape = (_IMAGES, c.channels, c.image_size, c.image_size)
        images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        try:
            _export(model, images, metadata, half / FILE)
        except torch.onnx.OnnxExporterError as problem:
            raise DataError(f"torch cannot export {c.name}: {first_line(problem)}") from None
        (half / CONFIG).write_text(json.dumps(config_to_json(c), indent=1))
        error = _difference(half / FILE, model, images)
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


def _difference(path: Path, model: nn.Module, images: Tensor) -> float:
    """Return the largest difference of logits for one image more than the model was exported with."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    more = torch.cat([images, images[:1].flip(-1)])
    logits = torch.from_numpy(session.run(["logits"], {"images": more.numpy()})[0])
    expected = model(more)
    return ((logits - expected).abs().max() / expected.abs().max().clamp(min=1e-6)).item()
