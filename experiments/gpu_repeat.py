"""Find what keeps a run on a GPU from being repeated bit by bit: which gradients differ, with which kernels.

    python experiments/gpu_repeat.py --json repeat.json           # a minute on an H100
    python experiments/gpu_repeat.py --tiny --device cpu          # a rehearsal

A case takes two steps of a small ViT with 197 tokens twice in one process, and again in a second process with an empty
cache of compiled code, as a run that is resumed on another machine. Fingerprints of all gradients are compared.

| case          | blocks                                                                                         |
|---------------|------------------------------------------------------------------------------------------------|
| eager         | not compiled                                                                                   |
| compiled      | compiled; torch's compiler times kernels on the device and keeps the fastest                   |
| deterministic | compiled without such timing (TORCHINDUCTOR_DETERMINISTIC)                                     |
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from bench.harness import Report, parser
from bench.ours import vitpar_step
from vitpar.launch import ALONE, join, leave
from vitpar.models import model_config
from vitpar.sharded import local
from vitpar.strategy import parse, validate

CASES: dict[str, dict[str, str]] = {"eager": {}, "compiled": {}, "deterministic": {"TORCHINDUCTOR_DETERMINISTIC": "1"}}
KERNELS = ("cudnn", "flash", "efficient")
SIZES = {"image_size": 28, "patch_size": 2, "embed_dim": 128, "depth": 4, "num_heads": 2, "drop_path": 0.1}
TINY = {"image_size": 8, "embed_dim": 16, "depth": 2}
BATCH, STEPS, LIVES, AT_ONCE = 8, 2, 2, 4
LIMIT_S = 300


def main() -> None:
    """Run all cases and print which gradients differ."""
    made = parser(__doc__)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--tiny", action="store_true", help="a tiny model: only to see the program run")
    made.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    made.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS, metavar="KERNEL", help="of attention")
    made.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    made.add_argument("--kernel", help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.case:
        print(json.dumps(fingerprints(options)))
        return
    report, rows = Report(options.json), list[dict[str, Any]]()
    kernels = options.kernels if options.device == "cuda" else ("flash",)
    cases = list(itertools.product(options.cases, kernels))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for (case, kernel), processes in zip(
            cases, pool.map(lambda each: compared(options, *each), cases), strict=True
        ):
            rows.append({"case": case, "attention": kernel, **processes})
            print(rows[-1], flush=True)
            report.keep("rows", rows)


def compared(options: argparse.Namespace, case: str, kernel: str) -> dict[str, Any]:
    """Run a case in two processes; return the gradients that differ within the first, and between both, by step."""
    runs = []
    for _ in range(2):
        with tempfile.TemporaryDirectory() as folder:
            words = [sys.executable, __file__, "--case", case, "--kernel", kernel, "--device", options.device]
            caches = dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), folder)
            variables = os.environ | caches | CASES[case] | {"TORCHINDUCTOR_COMPILE_THREADS": "2"}
            words += ["--tiny"] * options.tiny
            try:
                done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                return {"error": f"not done within {LIMIT_S} s"}
            if done.returncode:
                return {"error": done.stderr.strip().splitlines()[-1][:200]}
            runs.append(json.loads(done.stdout.splitlines()[-1]))
    return {"in_a_process": differing(*runs[0]), "between_processes": differing(runs[0][0], runs[1][0])}


def differing(first: list[dict[str, str]], second: list[dict[str, str]]) -> list[list[str]]:
    """Return for each step the names whose fingerprints differ."""
    return [[name for name in one if one[name] != other[name]] for one, other in zip(first, second, strict=True)]


def fingerprints(options: argparse.Namespace) -> list[list[dict[str, str]]]:
    """Return for each life of a model, and each of its steps, fingerprints of the loss and of all gradients."""
    device = join(ALONE, options.device)
    config = model_config("vit_custom", num_classes=10, init="moco", **SIZES | (TINY if options.tiny else {}))
    plan, lives = validate(parse("dp1"), config, BATCH), []
    g = torch.Generator().manual_seed(0)
    images = torch.randn(BATCH, 3, config.image_size, config.image_size, generator=g).to(device)
    labels = torch.randint(10, (BATCH,), generator=g).to(device)
    keys = torch.arange(BATCH, device=device)
    for _ in range(LIVES):
        steps: list[dict[str, str]] = []
        step = vitpar_step(
            config,
            plan,
            BATCH,
            device,
            precision="bf16" if device.type == "cuda" else "fp32",
            compile_blocks=options.case != "eager",
            kernel=options.kernel,
            before_update=lambda steps=steps: steps.append(gradients(step.model)),  # noqa: B023
        )
        for n in range(STEPS):
            loss, _ = step(images, labels, keys)
            steps[n]["loss"] = fingerprint(loss)
        lives.append(steps)
    leave()
    return lives


def gradients(model: torch.nn.Module) -> dict[str, str]:
    """Return fingerprints of all gradients."""
    return {name: fingerprint(local(p.grad)) for name, p in model.named_parameters() if p.grad is not None}


def fingerprint(x: torch.Tensor) -> str:
    """Return a fingerprint of a tensor's bits."""
    return hashlib.sha256(x.detach().double().cpu().numpy().tobytes()).hexdigest()[:16]


if __name__ == "__main__":
    main()
