"""Parts of the first run on a GPU, the most important first, and the programs that each part starts."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from bench.gpu_models import FP8_GAIN, MODELS, SETTINGS_GAIN

ROOT = Path(__file__).resolve().parents[3]
BASE, LARGE, HUGE, GIANT = MODELS
MINUTES = "{minutes}"
"""Placeholder in a command: the minutes left to its part."""
RESULT = "{result}"
"""Placeholder in a command: the JSON file that it writes."""

BENCH = ("torch", "numpy", "einops")
"""Packages that programs need which only train."""
DATA = ("pydantic", "webdataset", "braceexpand", "simplejpeg", "tomli_w", "safetensors", "PIL")
VITPAR = (*BENCH, *DATA, "typer", "rich")
PEERS = ("timm", "transformers", "lightning")
"""Optional packages: without one, bench_peers.py leaves out its contender."""

BLAS_LT = {"TORCH_BLAS_PREFER_CUBLASLT": "1", "TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"}
SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "coordinate descent": {"TORCHINDUCTOR_COORDINATE_DESCENT_TUNING": "1"},
    "cuBLASLt, workspace of 256 MiB": {**BLAS_LT, "CUBLASLT_WORKSPACE_SIZE": "262144"},
    "pointwise kernels tuned": {"TORCHINDUCTOR_MAX_AUTOTUNE_POINTWISE": "1"},
    "no mix-order reduction": {"TORCHINDUCTOR_MIX_ORDER_REDUCTION": "0"},
    "mix-order reduction, split tuned": {"TORCHINDUCTOR_MIX_ORDER_REDUCTION_AUTOTUNE_SPLIT_SIZE": "1"},
    "default again": {},
}
"""Environment variables of each compiler setting. torch's default uses mix-order reduction.

The default is measured again at the end, to show how much the GPU's speed has drifted.
"""


@dataclass(frozen=True)
class Job:
    """One program of a part."""

    name: str
    command: tuple[str, ...]
    """Arguments of the Python interpreter."""
    prediction: str
    """Predicted outcome, as text."""
    reads: Literal["file", "stdout", "pytest"] = "file"
    """Source of its measurements: the file `RESULT`, the last JSON line that it prints, or the lines of pytest."""
    environment: dict[str, str] = field(default_factory=dict)
    """Additional environment variables."""


@dataclass(frozen=True)
class Part:
    """Programs that share a time limit."""

    name: str
    what: str
    """Title in the report."""
    needs: tuple[str, ...]
    """Packages that all of its programs need."""
    jobs: Callable[[bool, str], list[Job]]
    """Returns its programs, given whether this is a tiny rehearsal, and the device."""


def check(tiny: bool, device: str) -> list[Job]:
    """Return `vitpar check`, which compares a plan with one process."""
    compiling = "--no-compile" if tiny else "--compile"
    words = ("check", "--mesh", "dp1", "--precision", "bf16", compiling, "--device", device, "--json")
    return [Job("check", ("-m", "vitpar_cli.main", *words), "passes", "stdout")]


def bench_gpu(name: str, tiny: bool, device: str, prediction: str, *words: str, models: tuple[str, ...] = ()) -> Job:
    """Return a call of bench_gpu.py.

    words: further arguments. models: models to measure, empty for all; ignored if `tiny`.
    """
    more = ("--tiny", "--steps", "1") if tiny else ("--models", *models) if models else ()
    command = ("experiments/bench_gpu.py", "--device", device, *words, *more, "--minutes", MINUTES, "--json", RESULT)
    return Job(name, command, prediction)


def vitpar(tiny: bool, device: str) -> list[Job]:
    """Return the measurement of the trainer's step for every model."""
    return [bench_gpu("step", tiny, device, "a row for each model, in the table", "--sections", "vitpar")]


def tests(tiny: bool, device: str) -> list[Job]:
    """Return the GPU tests. Without a GPU, each of them is skipped."""
    there = importlib.util.find_spec("xdist") is not None
    processes = ("-n", str(max(1, min(6, (os.cpu_count() or 2) // 2)))) if there and not tiny else ()
    # Not the repository's addopts: a machine may lack the plugin whose marker it uses.
    options = ("-v", "--color=no", "-o", "addopts=", "-p", "no:cacheprovider", *processes)
    words = "all pass; resuming to the last bit may fail at 257 tokens"
    return [Job("test_cuda", ("-m", "pytest", *options, "tests/parallel/test_cuda.py"), words, "pytest")]


def settings(tiny: bool, device: str) -> list[Job]:
    """Return a measurement for each compiler setting, each in a new process."""
    low, high = SETTINGS_GAIN
    found = []
    for name, variables in list(SETTINGS.items())[: 2 if tiny else None]:
        words = f"the best setting wins {low} to {high} %"
        job = bench_gpu(name, tiny, device, words, "--sections", "vitpar", models=(LARGE,))
        found.append(replace(job, environment=variables))
    return found


def fp8(model: str) -> Callable[[bool, str], list[Job]]:
    """Return a function that makes comparisons of fp8 with bf16, one for each kind of accumulation."""
    low, high = FP8_GAIN

    def jobs(tiny: bool, device: str) -> list[Job]:
        sums = {name: ("--fp8-fast-accum", name) for name in ("forward", "always", "never")}
        words = f"{low} to {high} % faster than bf16"
        return [
            bench_gpu(f"{model}, {name}", tiny, device, words, "--sections", "fp8", *more, models=(model,))
            for name, more in list(sums.items())[: 1 if tiny else None]
        ]

    return jobs


def peers(model: str) -> Callable[[bool, str], list[Job]]:
    """Return a function that makes a comparison of vitpar with other libraries on one model."""

    def jobs(tiny: bool, device: str) -> list[Job]:
        small = ("--tiny", "--rounds", "2", "--precision", "fp32", "--only", "vitpar_step", "plain")
        more = small if tiny else ("--models", model)
        command = ("experiments/bench_peers.py", "--device", device, *more, "--minutes", MINUTES, "--json", RESULT)
        return [Job(model, command, "none")]

    return jobs


def section(name: str, *words: str) -> Callable[[bool, str], list[Job]]:
    """Return a function that makes a call of bench_gpu.py with the sections `words`."""
    return lambda tiny, device: [bench_gpu(name, tiny, device, "none", "--sections", *words, models=(BASE,))]


PARTS = {
    part.name: part
    for part in (
        Part("check", "the plan dp1 against one process, compiled", VITPAR, check),
        Part("vitpar", "the step of every model", BENCH, vitpar),
        Part("tests", "tests/parallel/test_cuda.py", (*VITPAR, "pytest"), tests),
        Part("settings", f"settings of the compiler, {LARGE}", BENCH, settings),
        Part("fp8", f"fp8 beside bf16, {HUGE}", BENCH, fp8(HUGE)),
        Part("peers", f"the loops of others, {BASE}", (*BENCH, "rich"), peers(BASE)),
        Part("input", "JPEG files beside a batch in memory", (*BENCH, *DATA), section("input", "vitpar", "input")),
        Part("plain", "a plain compiled loop", BENCH, section("plain", "plain")),
        Part("fp8-giant", f"fp8 beside bf16, {GIANT}", BENCH, fp8(GIANT)),
        Part("peers-large", f"the loops of others, {LARGE}", (*BENCH, "rich"), peers(LARGE)),
    )
}


def missing(packages: tuple[str, ...]) -> list[str]:
    """Return those of `packages` that cannot be found."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


def environment() -> dict[str, str]:
    """Return the environment of all programs, with this checkout first in PYTHONPATH."""
    paths = [str(ROOT / folder) for folder in ("src", "cli", "experiments")]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    return found | {"PYTHONUNBUFFERED": "1"}


def argv(job: Job, result: Path, minutes: float) -> list[str]:
    """Return the command line of `job`."""
    given = {MINUTES: f"{minutes:.2f}", RESULT: str(result)}
    return [sys.executable, *(given.get(word, word) for word in job.command)]
