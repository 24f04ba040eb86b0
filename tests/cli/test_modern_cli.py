"""A DINOv3 on the command line: from timm, fine-tuned under a mesh, on under another, to timm and transformers."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from helpers.command_line import Command
from helpers.imported import model_of
from helpers.oracles import timm, transformers

OPTIONS = {
    "img_size": 8,
    "patch_size": 2,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 4,
    "num_classes": 9,
    "global_pool": "token",
    "dynamic_img_size": False,
}
NAME = "vit_small_patch16_dinov3_qkvb"


def our_logits(folder: Path, images: Tensor) -> Tensor:
    model = model_of(folder)
    for layer in model.layers().values():
        layer.reset_buffers()
    with torch.no_grad():
        return model(images)


@pytest.fixture(scope="module")
def place(place: Path) -> Path:
    """Return a folder with packed data, and a DINOv3 of timm with random values."""
    torch.manual_seed(0)
    model = timm.create_model(NAME, **OPTIONS)
    timm.models.save_for_hf(model, place / "there", model_args=OPTIONS, safe_serialization=True)
    return place


@pytest.mark.slow
def test_dinov3_goes_in_is_fine_tuned_and_goes_out(place: Path, vitpar: Command) -> None:
    def run(*words: str) -> str:
        done = vitpar(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("checkpoint", "import", "there", "--out", "here", "--classes", "7")
    words = ("--recipe", "here/recipe.toml", "--weights", "here", "--data", "data", "--batch-size", "8")
    run("train", *words, "--mesh", "tp2xdp2", "--steps", "1", "--run-dir", "run", "--set", "data.workers=0")
    run("train", "--resume", "run", "--mesh", "fsdp2", "--steps", "2", "--allow-change", "train.steps")
    for name in ("timm", "transformers", "vitpar"):
        run("checkpoint", "export", "run", "--format", name, "--out", name)
    images = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    expected = our_logits(place / "vitpar", images)
    assert not torch.allclose(expected, our_logits(place / "here", images)), "training changed nothing"
    with torch.no_grad():
        theirs = timm.create_model(f"local-dir:{place / 'timm'}", pretrained=True).eval()(images)
        pooled = transformers.AutoModel.from_pretrained(place / "transformers").eval()(images).pooler_output
    head = load_file(place / "transformers" / "classifier.safetensors")
    torch.testing.assert_close(theirs, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        F.linear(pooled, head["classifier.weight"], head["classifier.bias"]), expected, atol=1e-5, rtol=1e-5
    )
