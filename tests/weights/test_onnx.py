"""Export as ONNX: the logits of ONNX Runtime equal torch's for any number of images."""

import json
from pathlib import Path

import pytest

from helpers.modern_vits import modern_config, modern_model
from helpers.written_weights import weights_of
from vitpar import model_config
from vitpar.errors import CheckpointError
from vitpar.models.initial import initialise
from vitpar.models.layers import LayeredModel
from vitpar.weights.onnx import FILE, export_onnx


@pytest.mark.parametrize(
    "parts", ["eva02_base", *(pytest.param(name, marks=pytest.mark.slow) for name in ("vit_22b", "siglip2"))]
)
def test_onnx_runtime_computes_the_same(parts: str, tmp_path: Path) -> None:
    config = modern_config(parts)
    weights = weights_of(modern_model(config), config, tmp_path / "here")
    assert export_onnx(weights, tmp_path / "there") < 1e-5
    assert {path.name for path in (tmp_path / "there").iterdir()} == {FILE, "config.json"}
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        export_onnx(weights, tmp_path / "there")


def test_swin_is_exported_too(tmp_path: Path) -> None:
    config = model_config("swin_nano_patch2_window4_32", num_classes=5, init="perturbed")
    model = LayeredModel(config)
    initialise(model, 0, config)
    weights = weights_of(model, config, tmp_path / "here")
    (tmp_path / "here/classes.json").write_text(json.dumps(["ant", "bee", "cat", "dög", "eel"]))
    assert export_onnx(weights, tmp_path / "there") < 1e-5
    assert _metadata(tmp_path / "there") == {
        "num_classes": "5",
        "input_size": "[3, 32, 32]",
        "mean": "[0.1, 0.2, 0.3]",
        "std": "[0.4, 0.5, 0.6]",
        "interpolation": "bilinear",
        "crop_pct": "0.9",
        "crop_mode": "center",
        "label_names": json.dumps(["ant", "bee", "cat", "dög", "eel"]),
    }


def _metadata(folder: Path) -> dict[str, str]:
    """Return the model's metadata as ONNX Runtime reads them."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(folder / FILE), providers=["CPUExecutionProvider"])
    return dict(session.get_modelmeta().custom_metadata_map)
