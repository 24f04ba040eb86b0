"""Fast paths: equal losses with each of them on and off, and the rules that choose them."""

import gc
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from helpers.command_line import refusal, run
from helpers.ranks import in_forks
from vitpar import ViTConfig, model_config, parse, validate
from vitpar.data.transforms.batch import Normalize
from vitpar.errors import RecipeError
from vitpar.models.compiled import trains_compiled
from vitpar.parallel import attention, compiling
from vitpar.parallel.attention import AttentionChoice, choose_attention, probe, use_attention
from vitpar.parallel.compiling import Compiling, choose_compiling, compiler_fault
from vitpar.parallel.precision import resolve_precision, slow_here
from vitpar.strategy import Plan
from vitpar.training.step import Garbage

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BATCH = 8
SLOW_PATH = {"train.compile": False, "train.attention": "math", "optimizer.implementation": "for-loop"}
FAST_PATHS: dict[str, dict[str, Any]] = {
    "fused": {"optimizer.implementation": "fused"},
    "all": {"train.compile": True, "train.attention": "flash", "optimizer.implementation": "fused"},
}


@pytest.fixture(autouse=True)
def torchs_attention() -> Any:
    yield
    use_attention(None)


def plan_of(mesh: str = "dp1", **fields: Any) -> tuple[ViTConfig, Plan]:
    config = model_config("vit_nano_patch4_16", num_classes=10, depth=4)
    return config, validate(replace(parse(mesh), **fields), config, BATCH)


def losses(place: Path, data: Path, name: str, settings: dict[str, Any]) -> list[float]:
    sizes = {"image_size": 8, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4, "drop_path": 0.1}
    values = {f"model.{key}": value for key, value in sizes.items()}
    values |= {"model.init": "moco", "train.precision": "fp32", "train.log_every": 1, "augment.mixup": 0.8}
    values |= {"optimizer.lr": 1e-3, **settings}
    words = [f"--set={key}={json.dumps(value)}" for key, value in values.items()]
    common = ["train", "--data", str(data), "--model", "vit_custom", "--steps", "6", "--batch-size", str(BATCH)]
    done = run(place, [*common, *words, "--device", "cpu", "--run-dir", name])
    assert done.returncode == 0, done.stderr
    rows = map(json.loads, (place / name / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if row["kind"] == "train"]


@pytest.fixture(scope="module")
def slowly(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of the run without any fast path."""
    return losses(tmp_path_factory.mktemp("slow"), data, "slow", SLOW_PATH)


@pytest.mark.parametrize("path", ["fused", pytest.param("all", marks=pytest.mark.slow)])
def test_losses_are_equal_with_each_fast_path(path: str, data: Path, slowly: list[float], tmp_path: Path) -> None:
    found = losses(tmp_path, data, path, {**SLOW_PATH, **FAST_PATHS[path]})
    assert found == pytest.approx(slowly, rel=1e-4)
    assert len(set(slowly)) == 6  # the losses change, so equality means something
    kernels = json.loads((tmp_path / path / "env.json").read_text())
    assert kernels["compiled"] is ("train.compile" in FAST_PATHS[path])
    assert kernels["attention"]["backend"] == {**SLOW_PATH, **FAST_PATHS[path]}["train.attention"]


@pytest.mark.slow
def test_compiled_normalisation_matches_eager() -> None:
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    plain = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    for dtype in (torch.float32, torch.bfloat16):
        at_once = replace(plain, compiled=True)(images, dtype)
        assert at_once.dtype is dtype
        assert torch.allclose(at_once, plain(images, dtype), rtol=1e-2 if dtype is torch.bfloat16 else 1e-6)


def test_precision_without_cpu_instructions_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for supported in (True, False):
        for name in ("bf16", "fp16"):
            monkeypatch.setattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", lambda answer=supported: answer)
        assert (slow_here("bf16", CPU) is None) is supported
    assert "no fp16 instructions" in (slow_here("fp16", CPU) or "")
    assert slow_here("fp32", CPU) is None and slow_here("bf16", CUDA) is None


# compiling


class Branch(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if trains_compiled() else x - 1


def test_compiler_sees_that_it_traces_a_training_step() -> None:
    """Before torch 2.13 its compiler takes ``is_exporting()`` for True in every graph (pytorch#176347)."""
    x, plain = torch.zeros(1), Branch()
    traced = torch.compile(Branch(), backend="eager", fullgraph=True)
    assert traced(x).item() == 1 and plain(x).item() == -1
    with torch.no_grad():
        assert traced(x).item() == -1, "in evaluation"
    assert torch.export.export(plain, (x,)).module()(x).item() == -1


def test_blocks_are_compiled_by_default_on_gpus_only(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "compiler_fault", lambda device: None)
    _, plan = plan_of()
    assert choose_compiling(None, plan, "bf16", CPU) == Compiling(False)
    assert choose_compiling(None, plan, "bf16", CUDA) == Compiling(True)
    assert choose_compiling(False, plan, "bf16", CUDA) == Compiling(False)
    assert choose_compiling(True, plan, "bf16", CPU) == Compiling(True)
    _, selective = plan_of("dp1+ckpt.selective")
    refused = choose_compiling(None, selective, "bf16", CUDA)
    assert not refused.blocks and "a compiled block cannot select" in (refused.because or "")


def test_missing_compiler_falls_back_unless_compile_was_requested(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(function: Any) -> Any:
        raise RuntimeError("\nno g++ in sight\nand more")

    _, plan = plan_of()
    monkeypatch.setattr(torch, "compile", broken)
    assert compiler_fault(CPU) == "the compiler does not work for this cpu device (no g++ in sight)"
    monkeypatch.setattr(compiling, "compiler_fault", lambda device: "the compiler is gone")
    assert choose_compiling(None, plan, "bf16", CUDA) == Compiling(False, "the compiler is gone")
    with pytest.raises(RecipeError, match=r"train.compile is true, but the compiler is gone: fix that"):
        choose_compiling(True, plan, "bf16", CPU)


# attention


def test_fastest_attention_is_chosen_on_gpus_and_kept_on_resume(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run keeps its kernel, because kernels differ in the last digits."""
    config, plan = plan_of()
    tried: list[tuple[str, ...]] = []
    rates = {"flash": 2.0, "cudnn": 1.0, "efficient": math.inf}

    def pretended(names: tuple[str, ...], *_: Any) -> dict[str, float]:
        tried.append(tuple(names))
        return {name: rates[name] for name in names}

    monkeypatch.setattr(attention, "probe", pretended)
    precision = resolve_precision("bf16")
    found = choose_attention("auto", config, plan, BATCH, precision, CUDA)
    assert found.backend == "cudnn" and found.to_json()["milliseconds"] == {
        **{"cudnn": 1000.0, "flash": 2000.0, "efficient": None}
    }
    assert torch.backends.cuda.cudnn_sdp_enabled() and not torch.backends.cuda.flash_sdp_enabled()
    assert not torch.backends.cuda.math_sdp_enabled() and found.warning is None
    assert choose_attention("auto", config, plan, BATCH, precision, CUDA, kept="flash").backend == "flash"
    assert choose_attention("auto", config, plan, BATCH, precision, CUDA, kept="efficient").backend == "cudnn"
    rates.update(flash=math.inf, cudnn=math.inf)
    without = choose_attention("auto", config, plan, BATCH, precision, CUDA)
    assert without.backend is None and without.warning is not None
    assert "no attention kernel supports heads of 8 features in torch.bfloat16 on this GPU" in without.warning
    assert "(tried cudnn, flash, efficient)" in without.warning
    assert without.warning.endswith("per head: use heads of 64 or 128 features")
    assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.math_sdp_enabled()
    with pytest.raises(
        RecipeError, match=r"'flash' does not support heads of 8 features in torch.bfloat16 on this cuda"
    ):
        choose_attention("flash", config, plan, BATCH, precision, CUDA)


def test_math_attention_is_a_fallback_on_cpus_only(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The math backend needs memory quadratic in the tokens, so it must not replace another one silently on a GPU."""
    config, plan = plan_of()
    monkeypatch.setattr(attention, "probe", lambda names, *_: dict.fromkeys(names, 1.0))
    q = torch.randn(2, 4, 9, 8)
    masked = {"attn_mask": torch.zeros(9, 9, requires_grad=True)}  # FlashAttention has no gradient of a mask
    attend = torch.nn.functional.scaled_dot_product_attention
    choose_attention("flash", config, plan, BATCH, resolve_precision("bf16"), CUDA)
    attend(q, q, q)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # as `vitpar check` computes its reference
        attend(q, q, q)
    assert not torch.backends.cuda.math_sdp_enabled()
    with pytest.raises(RuntimeError, match=r"(?i)no (available|viable)"):
        attend(q, q, q, **masked)
    choose_attention("math", config, plan, BATCH, resolve_precision("bf16"), CUDA)
    attend(q, q, q, **masked)
    choose_attention("flash", config, plan, BATCH, resolve_precision("bf16"), CPU)
    attend(q, q, q, **masked)


def traced(compiler: str, backends: Sequence[str]) -> list[str]:
    """Return the kernel that a compiled attention runs for each of `backends`."""
    attend, found = torch.compile(lambda x: scaled_dot_product_attention(x, x, x), backend=compiler), []
    for backend in backends:
        use_attention(backend)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            attend(torch.randn(2, 4, 9, 8, requires_grad=True)).sum().backward()
        names = {event.key for event in profile.key_averages()}
        found.append("flash" if "aten::_scaled_dot_product_flash_attention_for_cpu" in names else "math")
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_block_uses_the_currently_chosen_attention(compiler: str, tmp_path: Path) -> None:
    """torch.compile bakes the kernel into the graph at tracing, so a later choice must trigger a new graph.

    By itself, inductor's cache on disk does not distinguish graphs that use different kernels. It leaves out those with
    autograd functions, such as vitpar's linear layers, but not those of other models.
    """
    cache, chosen = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}, ["flash", "math", "flash"]
    assert in_forks(traced, [cache], compiler, chosen, seconds=800.0) == [chosen]


def test_attention_within_timing_noise_keeps_the_preferred_backend(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise noise would choose a different kernel on every start."""
    config, plan = plan_of()
    rates = {"cudnn": 1.0, "flash": 0.98, "efficient": 1.5}
    monkeypatch.setattr(attention, "probe", lambda names, *_: {name: rates[name] for name in names})
    assert choose_attention("auto", config, plan, BATCH, resolve_precision("bf16"), CUDA).backend == "cudnn"


def test_cpu_attention_is_left_to_torch_unless_set(alone: None) -> None:
    config, plan = plan_of()
    precision = resolve_precision("fp32")
    assert choose_attention("auto", config, plan, BATCH, precision, CPU, kept="cudnn") == AttentionChoice()
    seconds = probe(("flash", "math", "cudnn"), config, plan, BATCH, precision, CPU)
    assert 0 < seconds["flash"] < math.inf and 0 < seconds["math"] < math.inf
    assert choose_attention("math", config, plan, BATCH, precision, CPU).backend == "math"
    assert not torch.backends.cuda.flash_sdp_enabled()
    with pytest.raises(RecipeError, match=r"'cudnn' does not run on a cpu device: use auto, flash or math"):
        choose_attention("cudnn", config, plan, BATCH, precision, CPU)


def test_attention_backend_that_cannot_run_is_refused_before_launch(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--mesh", "dp2", "--set", "train.attention=cudnn", "--device", "cpu", "--model", "vit_tiny_patch16_224"]
    training = ["--data", str(data), "--steps", "1", "--run-dir", str(tmp_path / "run")]
    for words in (["train", *training], ["check"], ["bench"]):
        told = refusal([words[0], *common, *words[1:]], monkeypatch, capsys)
        assert "train.attention 'cudnn' does not run on a cpu device" in told
    assert not (tmp_path / "run").exists()


# garbage


def test_garbage_collection_runs_between_steps_only() -> None:
    """A collection in the middle of a step would delay one rank, for which all others wait."""
    assert gc.isenabled()
    collected: list[str] = []
    gc.callbacks.append(lambda phase, info: collected.append(phase))
    try:
        with Garbage() as garbage:
            assert not gc.isenabled()
            collected.clear()
            for number in range(1, 101):
                garbage.maybe_collect(number, 0.5)  # every tenth step, if steps take half a second
            assert collected.count("stop") == 10
    finally:
        gc.callbacks.pop()
    assert gc.isenabled() and gc.get_freeze_count() == 0
