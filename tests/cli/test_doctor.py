"""`vitpar doctor`: its report on this machine, and the problems it finds on others."""

import copy
import json
import tomllib
from collections.abc import Callable
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from helpers.paths import ROOT
from vitpar.doctor import MINIMUM, collect, problems
from vitpar_cli.doctor import doctor

HEALTHY: dict[str, Any] = {
    "versions": MINIMUM | {"vitpar": "0.1.0", "torch": "2.13.0+cu130"},
    "system": {
        **{"os": "Linux", "machine": "x86_64", "cores": 8},
        **{"memory_bytes": 64 * 10**9, "memory_available_bytes": 60 * 10**9},
    },
    "torch": None,
    "cpu_capability": "AVX512",
    "devices": [{"name": "H200", "memory_bytes": 141 * 10**9, "compute_capability": [9, 0]}],
    "distributed": {"gloo": True, "nccl": True, "cuda": "13.0"},
    "gpu_driver": True,
    "world": None,
    "limits": {"open_files": 65536, "user_processes": None, "shared_memory_bytes": 8 * 10**9},
    "local_world": {"ok": True, "seconds": 3.0, "error": None},
    "compiler": "/usr/bin/g++",
    "timm": None,
}


def run(monkeypatch: pytest.MonkeyPatch, report: dict[str, Any], *options: str):
    """Run `vitpar doctor` on a machine with the given report."""
    monkeypatch.setattr("vitpar_cli.doctor.collect", lambda: copy.deepcopy(report))
    app = typer.Typer()
    app.command()(doctor)
    return CliRunner().invoke(app, list(options))


def test_this_machine_has_no_errors() -> None:
    report = collect()
    assert report["local_world"]["ok"], report["local_world"]
    assert report["distributed"]["gloo"] and report["system"]["cores"] >= 1
    assert report.keys() == HEALTHY.keys()
    assert not [message for severity, message in problems(report) if severity == "error"]
    json.dumps(report)


def test_minimum_versions_match_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [f"python{project['requires-python']}", *project["dependencies"]]
    assert {tuple(requirement.split(">=")) for requirement in declared} == set(MINIMUM.items())


Change = Callable[[dict[str, Any]], None]


PROBLEMS: list[tuple[Change, str, str]] = [
    (lambda r: r["versions"].update(torch="2.9.1"), "error", "torch is 2.9.1 but vitpar needs 2.11 or newer: pip"),
    (lambda r: r["versions"].update(einops=None), "error", "einops is missing: pip install 'einops>=0.8'"),
    (lambda r: r["versions"].update(simplejpeg=None), "warning", "simplejpeg is missing, so the slower"),
    (lambda r: r.update(torch="libc10.so not found"), "error", "torch is installed but cannot be imported (libc10"),
    (lambda r: r["distributed"].update(gloo=False), "error", "this torch has no gloo backend"),
    (lambda r: r["distributed"].update(nccl=False), "error", "1 GPUs but a torch without NCCL: install torch"),
    (lambda r: r["local_world"].update(ok=False, error="x"), "error", "an all-reduce of two local ranks failed"),
    (lambda r: r.update(world={"error": "RANK is 'x'"}), "error", "RANK is 'x'"),
    (lambda r: r.update(devices=[]), "warning", "an NVIDIA driver is loaded but torch sees no GPU (the driver may"),
    (lambda r: r["devices"][0].update(compute_capability=[7, 5]), "warning", "GPU 0 (H200, 7.5) is too old for"),
    (lambda r: r["limits"].update(open_files=256), "warning", "the limit of open files is 256"),
    (lambda r: r["limits"].update(user_processes=64), "warning", "the limit of processes is 64: raise it with"),
    (lambda r: r["limits"].update(shared_memory_bytes=64 * 2**20), "warning", "/dev/shm, which NCCL"),
    (lambda r: r["system"].update(memory_available_bytes=10**8), "warning", "only 0.1 GB of memory is free"),
    (lambda r: r.update(compiler=None), "warning", "no C++ compiler was found"),
    (lambda r: r.update(timm="no nms"), "warning", "timm is installed but cannot be imported (no nms), which only"),
]


def test_each_problem_is_found_separately() -> None:
    for change, severity, sentence in PROBLEMS:
        report = copy.deepcopy(HEALTHY)
        change(report)
        [(found, message)] = problems(report)
        assert found == severity and message.startswith(sentence), sentence


def test_command_prints_problems_errors_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems(HEALTHY) == []
    result = run(monkeypatch, HEALTHY)
    assert result.exit_code == 0
    assert "no problems found" in result.output and "H200, 141.0 GB, compute capability 9.0" in result.output
    result = run(monkeypatch, HEALTHY | {"compiler": None})
    assert result.exit_code == 0 and "warning: no C++ compiler was found" in result.output
    report = copy.deepcopy(HEALTHY) | {"compiler": None, "world": {"error": "RANK is 'x'"}}
    result = run(monkeypatch, report, "--json")
    assert result.exit_code == 1
    printed = json.loads(result.output)
    assert [problem["severity"] for problem in printed.pop("problems")] == ["error", "warning"]
    assert printed == report
