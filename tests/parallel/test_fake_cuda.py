"""Training steps on a simulated CUDA device, without a GPU: no device mismatch and no synchronisation.

Two things are not covered: compiled blocks, because the compiler cannot trace the simulated tensors, and the choice of
the attention kernel, which measures time. Rank 0 stands for all ranks, except in a pipeline.
"""

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from bench.simulated_gpu.library import build, compiler
from helpers.fake_cuda_steps import FAULTS, Case
from helpers.paths import ROOT

OPTIMIZERS = ("adamw", "adam", "lion", "lamb", "lars", "muon", "sgd", "adafactor")
FOREACH = {"optimizer.implementation": "foreach"}
TAUGHT = {"distill.plan": "fsdp", "data.mean": [0.1, 0.2, 0.3], "data.std": [0.4, 0.5, 0.6]}
DROPS = {"model.drop_path": 0.1, "model.dropout": 0.1}
MIXED = {"augment.mixup": 0.8, "augment.cutmix": 1.0, "train.label_smoothing": 0.1}
OPTIONS = {
    **{"model.qk_norm": True, "model.layer_scale": 0.1, "model.num_reg_tokens": 2, "model.distillation": True},
    **{"model.position": "sincos2d", "model.representation_size": 48},
}
AUGMENTED = {"data.cache": "device", "augment.color_jitter": 0.4, "augment.random_erasing": 1.0, **MIXED}
SOME_OFFLOADED = "pp1: embed=dp1+offload, *=dp1"
FLOAT8 = {"train.precision": "fp8", "train.fp8_min_features": 0}
SCALED = {"train.precision": "fp16"}
CASES = (
    *(Case("dp1", {"optimizer.name": name}) for name in OPTIMIZERS),
    Case("dp1", FOREACH),
    Case("dp1", {"optimizer.name": "sgd", "optimizer.momentum": 0.9, **FOREACH}),
    Case("dp1", DROPS),
    Case("dp1", MIXED),
    # Many operations an image, so that each of them is among those of a batch.
    Case("dp1", {**AUGMENTED, "augment.policy": "rand-m9-n30-p1-mstd0.5"}),
    Case("tp2", {**AUGMENTED, "augment.policy": "3a", "data.crop_padding": 2}),
    Case("dp1", OPTIONS),
    Case("dp1", {"train.precision": "fp32"}),
    Case("dp1", FLOAT8),
    Case("dp1", SCALED, waits=1),  # reads the norm, which decides whether the step is skipped
    Case("dp1+ckpt"),
    Case("dp1+ckpt.selective", DROPS),
    Case("dp2", DROPS),
    Case("dp2", SCALED, waits=1),
    Case("dp2+zero1", MIXED),
    Case("fsdp2", DROPS),
    Case("fsdp2+ckpt", {"optimizer.name": "muon"}),
    Case("tp2", DROPS),
    Case("tp2+sp", DROPS),
    Case("tp2+sp", FLOAT8),
    Case("tp4+2d", DROPS),
    Case("tp2xfsdp2", {"optimizer.name": "lamb"}),
    *(Case("pp2", DROPS, rank=rank) for rank in (0, 1)),
    Case("dp2", TAUGHT | {"distill.kind": "soft", "model.distillation": True}),
    *(Case("pp2", TAUGHT | MIXED | {"distill.kind": "logits"}, rank=rank) for rank in (0, 1)),
    # Offloading moves norms and gradients to the host and back with copies and events that the host waits for.
    *(
        Case(SOME_OFFLOADED, {"optimizer.name": name}, waits=math.inf)
        for name in ("adamw", "lamb", "muon", "adafactor")
    ),
    Case("fsdp2+offload", waits=math.inf),
)
QUICK = (
    Case("dp1", {**AUGMENTED, "augment.policy": "rand-m9-n30-p1-mstd0.5"}),
    Case("dp1", SCALED, waits=1),
    Case("fsdp2", DROPS),
    Case("tp2+sp", DROPS),
    Case("pp2", DROPS, rank=0),
)
FAULTY = tuple(Case("dp1", fault=fault) for fault in FAULTS)
PROGRAM = """
import json, sys
from bench.simulated_gpu.library import load
library = load(sys.argv[1])  # before whatever imports torch
from helpers.fake_cuda_steps import Case, run_cases
run_cases(library, [Case(**fields) for fields in json.load(sys.stdin)])
"""


@pytest.fixture(scope="session")
def errors(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """Return the error of each chosen case by name. All run in one process with a simulated GPU."""
    if compiler() is None:
        pytest.skip("needs a C++ compiler: c++, g++, clang++, or the one that CXX names")
    cache = getattr(request.config, "cache", None)  # None if pytest's cache is disabled
    library = build(tmp_path_factory.mktemp("fake_cuda") if cache is None else cache.mkdir("fake_cuda"))
    paths = [
        *(str(ROOT / folder) for folder in ("src", "cli", "tests", "experiments")),
        os.environ.get("PYTHONPATH", ""),
    ]
    ours = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", PROGRAM, str(library)]
    chosen = {str(item.callspec.params["case"]) for item in request.session.items if item.path == Path(__file__)}
    cases = json.dumps([asdict(case) for case in (*CASES, *FAULTY) if str(case) in chosen])
    done = subprocess.run(command, env={**os.environ, **ours}, input=cases, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.each_row
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK else [pytest.mark.slow], id=str(case)) for case in CASES]
)
def test_step_never_leaves_the_device(case: Case, errors: dict[str, str | None]) -> None:
    error = errors[str(case)]
    assert error is None, error


@pytest.mark.slow
@pytest.mark.each_row
@pytest.mark.parametrize("case", FAULTY, ids=lambda case: case.fault)
def test_planted_fault_is_detected(case: Case, errors: dict[str, str | None]) -> None:
    assert case.fault is not None
    expected, error = FAULTS[case.fault].error, errors[str(case)]
    assert error is not None and expected in error.splitlines()[-1]
