"""Packed attention: the kernel in Triton's interpreter against the formula and torch, and where it is refused."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.interpreted import errors_of
from helpers.paths import ROOT
from vitpar import model_config, parse, validate
from vitpar.errors import RecipeError
from vitpar.models.compiled import packs_attention
from vitpar.parallel import attention
from vitpar.parallel.attention import by_products, choose_attention, use_attention
from vitpar.parallel.precision import resolve_precision

CASES = [
    *("one token", "a step", "a tile and one", "B/16", "H/14", "most"),
    *("fp16", "sharp", "eager", "compiled", "compiled, frozen bias"),
]
CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def errors() -> dict[str, str | None]:
    """Return the error of each case by name. All run in one process with Triton's interpreter."""
    return errors_of("packed_attention_cases")


@pytest.mark.parametrize("case", CASES)
def test_packed_attention_is_as_close_to_the_formula_as_torch(case: str, errors: dict[str, str | None]) -> None:
    assert set(errors) == set(CASES)
    assert errors[case] is None, errors[case]


BASE, MORE = "vit_base_patch16_224", "attention of this model takes more than one linear layer gives"


@pytest.mark.parametrize(
    ("model", "options", "precision", "because"),
    [
        (BASE, {}, "bf16", None),
        ("mae_vit_base", {}, "fp16", None),
        (BASE, {}, "fp32", "it computes in bfloat16 or float16, not in float32"),
        (BASE, {"image_size": 384}, "bf16", "the model has 577 tokens, and packed takes up to 288"),
        (BASE, {"num_heads": 4}, "bf16", "the model has heads of 192 features, and packed takes up to 128"),
        (BASE, {"qk_norm": True}, "bf16", MORE),
        ("swin_tiny_patch4_window7_224", {}, "bf16", MORE),
    ],
)
def test_packed_attention_is_refused_where_it_cannot_compute(
    model: str, options: dict[str, Any], precision: str, because: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "probe", lambda names, *_: dict.fromkeys(names, 1.0))
    config = model_config(model, **options)
    known = config, validate(parse("dp1"), config, 8), 8, resolve_precision(precision), CUDA
    try:
        resumed = choose_attention("auto", *known, kept="packed").backend
        if because is None:
            assert resumed == choose_attention("packed", *known).backend == "packed" and packs_attention()
            with by_products(torch.device("cpu")):
                assert not packs_attention(), "the reference of vitpar check is not the kernel under test"
            with torch.no_grad():
                assert not packs_attention()
        else:
            with pytest.raises(RecipeError, match=f"train.attention is packed, but {because}.*: use auto"):
                choose_attention("packed", *known)
            assert resumed == "cudnn" and not packs_attention()
        assert choose_attention("auto", *known).backend == "cudnn", "off until a GPU has timed it"
    finally:
        use_attention(None)


def test_broken_triton_is_an_error_of_packed_only(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ModuleNotFoundError("No module named 'triton'")

    config = model_config("vit_tiny_patch16_224", depth=1)
    plan, cpu = validate(parse("dp1"), config, 2), torch.device("cpu")
    monkeypatch.setattr(attention, "attend_packed", broken)
    monkeypatch.setattr(attention, "refuse_attention", lambda *_: None)
    with pytest.raises(RecipeError, match=r"'packed' does not support .* or Triton does not work: use auto"):
        choose_attention("packed", config, plan, 2, resolve_precision("bf16"), cpu)
    use_attention(None)


@pytest.mark.slow
def test_plan_with_packed_attention_matches_one_process(tmp_path: Path) -> None:
    """In fp16: AdamW's first step on nearly zero gradients of so small a model is noise in bf16, with any kernel."""
    if find_spec("triton") is None:
        pytest.skip("needs Triton: pip install --no-deps triton")
    mesh = "pp2: embed=tp2+sp, 0-1=tp2+ckpt.selective, *=fsdp2"
    sizes = {"image_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 4, "num_heads": 4}
    model = ["--model", "vit_custom", *(f"--set=model.{key}={value}" for key, value in sizes.items())]
    more = "--set=train.attention=packed --precision fp16 --batch-size 8 --device cpu"
    words = ["check", "--mesh", mesh, *model, *more.split()]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    program = str(ROOT / "tests" / "helpers" / "packed_vitpar.py")
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "cli"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*start, program, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0 and "passed: " in done.stdout, done.stdout + done.stderr
