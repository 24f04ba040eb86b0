"""Export as ONNX: the logits of ONNX Runtime equal torch's for any number of images."""

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
    assert export_onnx(weights_of(model, config, tmp_path / "here"), tmp_path / "there") < 1e-5
