"""The first run on a GPU, rehearsed without one: parts stop at their time limit and keep their measurements."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_state
from bench.first_run import tables
from bench.first_run.parts import PARTS, RESULT, Job
from bench.first_run.results import Results
from bench.first_run.running import Running, pytest_rows
from bench.gpu_models import GIB, MODELS, batch_for, prediction
from helpers.paths import ROOT

BASE, LARGE, HUGE, GIANT = MODELS
REHEARSAL = ("--tiny", "--device", "cpu")
ROWS = """
import json, os, subprocess, sys, time
path, seconds = sys.argv[1:]
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
for number in range(3):
    with open(path + ".partial", "w") as file:
        json.dump({"left_out": [], "rows": list(range(number)), "child": child.pid}, file)
    os.replace(path + ".partial", path)
time.sleep(float(seconds))
sys.exit(7)
"""


def step(model: str, batch_size: int, seconds: float, mfu: float | None) -> dict[str, Any]:
    """Return a row as bench_gpu.py writes it."""
    facts = {"waits": 0.0, "memory_bytes": 8 * GIB, "attention": {"backend": "cudnn"}}
    return {"model": model, "batch_size": batch_size, "seconds": [seconds] * 3, "mfu": mfu, **facts}


def bench(**sections: Any) -> dict[str, Any]:
    """Return the content of a file as bench_gpu.py writes it."""
    return {**{name: [] for name in ("limits", "vitpar", "plain", "fp8", "input", "left_out")}, **sections}


def start(out: Path, *words: str, blocked: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
    """Start the program without a virtual environment's launcher.

    blocked: packages that cannot be imported
    """
    begin = f"import sys, runpy; sys.modules |= dict.fromkeys({blocked!r}); sys.argv = sys.argv[1:]; " + (
        "sys.path.insert(0, 'experiments'); runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", begin, "experiments/gpu_first_run.py", "--out", str(out), *REHEARSAL, *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, **pipes)


def test_program_is_stopped_at_its_limit_and_keeps_its_rows(tmp_path: Path) -> None:
    results = Results(tmp_path)
    results.call({"hardware": "a test"})
    keep = results.keeper("vitpar", "rows", "none")
    job = Job("rows", ("-c", ROWS, RESULT, "60"), "none")
    found = Running(job, 4.0, tmp_path / "rows.json", results.log).wait(keep)
    keep(found)
    assert found["ended"] == "stopped at its time limit" and found["found"]["rows"] == [0, 1]
    for _ in range(100):  # the kernel needs a moment to remove the process
        if not Path(f"/proc/{found['found']['child']}/cmdline").exists():
            break
        time.sleep(0.1)
    else:
        state = Path(f"/proc/{found['found']['child']}/status").read_text()
        assert "zombie" in state, "a process that the program started goes on"
    kept = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert [run["found"]["rows"] for run in kept] == [[0, 1]]
    assert "the table cannot be made (KeyError" in (tmp_path / "report.md").read_text(), "and the run goes on"


def test_rows_are_kept_while_a_program_runs_and_its_failure_is_reported(tmp_path: Path) -> None:
    states: list[dict[str, Any]] = []
    job = Job("rows", ("-c", ROWS, RESULT, "2"), "none")
    found = Running(job, 60.0, tmp_path / "rows.json", tmp_path / "log.txt").wait(states.append)
    assert found["ended"] == "exit code 7"
    assert states and states[-1]["ended"] == "running" and states[-1]["found"]["rows"] == [0, 1]


def test_repeated_calls_add_to_one_folder(tmp_path: Path) -> None:
    for call, seconds in enumerate((0.2, 0.1)):
        results = Results(tmp_path)
        results.call({"date": f"day {call}"})
        row = step(BASE, 512, seconds, 0.3)
        results.keeper("vitpar", "step", "a row")({"ended": "ended", "found": bench(vitpar=[row]), "seconds": 1.0})
    results.keeper("vitpar", "step", "a row")({"ended": "left out: 0 s are left", "found": None})
    report = (tmp_path / "report.md").read_text()
    assert "day 0" in report and "day 1" in report
    assert "100.0 ms" in report and "200.0 ms" not in report, "the newest row of a job counts"
    assert len(json.loads((tmp_path / "results.json").read_text())["runs"]) == 3


def test_table_shows_predictions_next_to_measurements() -> None:
    rows = [step(BASE, 512, 0.125, 0.436), step(HUGE, 64, 0.2, 0.33), step("vit_tiny_patch16_224", 4, 0.1, None)]
    run = {"call": 0, "ended": "ended", "seconds": 9.0, "prediction": "a row", "found": bench(vitpar=rows)}
    lines = list(tables.lines("vitpar", {"step": run}))
    assert "| 122 ms, MFU 44.6 % (40–52) | 125.0 ms, MFU 43.6 % | within the range | 45 % |" in lines[2]
    assert "| 128 ms, MFU 51 % (43–56), from batch 128 | 200.0 ms, MFU 33.0 % | below the range |" in lines[3]
    assert "| none | 100.0 ms, MFU – | – | – |" in lines[4]


def test_table_compares_settings_and_fp8_with_the_default() -> None:
    runs = {
        name: {"call": 0, "ended": "ended", "prediction": "1 to 4 %", "found": bench(vitpar=[step(LARGE, 256, s, 0.5)])}
        for name, s in {"default": 0.2, "coordinate descent": 0.19}.items()
    }
    assert "| 190.00 | +5.0 % | 1 to 4 % |" in "\n".join(tables.lines("settings", runs))
    row = {"model": GIANT, "batch_size": 128, "seconds": {"vitpar": [0.4, 0.4], "fp8": [0.36, 0.36]}}
    row["losses"] = {"vitpar": 6.0, "fp8": 6.1}
    run = {"call": 0, "ended": "ended", "prediction": "5 to 12 %", "found": bench(fp8=[row])}
    assert "| 400.00 | 360.00 | +10.0 % | 5 to 12 % | 6.0000 | 6.1000 |" in "\n".join(
        tables.lines("fp8", {"exact": run})
    )


def test_outcomes_are_read_from_pytests_output() -> None:
    lines = [
        "tests/parallel/test_cuda.py::test_a[dp1+offload] PASSED                 [  1%]",
        "tests/parallel/test_cuda.py::test_b[pp1: embed=dp1, *=dp1] FAILED        [  2%]",
        "[gw1] [  4%] SKIPPED tests/parallel/test_cuda.py::test_c[x y] ",
        "tests/parallel/test_cuda.py::test_running",
        "FAILED tests/parallel/test_cuda.py::test_b[pp1: embed=dp1, *=dp1] - assert 1 == 2",
    ]
    found = pytest_rows(lines)
    assert [row["outcome"] for row in found.values()] == ["passed", "failed", "skipped"]
    assert found["tests/parallel/test_cuda.py::test_b[pp1: embed=dp1, *=dp1]"]["why"] == "assert 1 == 2"


def test_batch_sizes_follow_the_free_memory() -> None:
    sizes = {name: [batch_for(name, gib * GIB) for gib in (138, 78, 38)] for name in MODELS}
    assert sizes == {BASE: [512, 256, 128], LARGE: [256, 128, 64], HUGE: [128, 64, 32], GIANT: [128, 64, 32]}
    assert [batch_for(BASE, gib * GIB, peers=True) for gib in (138, 78)] == [256, 128]
    assert batch_for("vit_small_patch16_224", GIB // 100) == 1
    assert prediction(BASE, 256) == "61 ms, MFU 44.6 % (40–52), from batch 512"


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"memory.used": "3", "compute-apps": "", "reasons": "0x1"}, []),
        ({"memory.used": "3", "compute-apps": "77, python3, 900", "reasons": "0x0"}, ["77, python3, 900"]),
        ({"memory.used": "9000", "compute-apps": "", "reasons": "0x1"}, ["9000 MiB"]),
        ({"memory.used": "3", "compute-apps": "", "reasons": "0x44"}, ["software power cap, hardware thermal"]),
        (None, []),
    ],
)
def test_busy_gpu_is_reported(
    answers: dict[str, str] | None, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes older drivers, which have other field names, and machines without nvidia-smi."""
    if answers is not None:
        (tmp_path / "nvidia-smi").write_text(
            f'#!/bin/sh\ncase "$1" in\n*compute-apps*) echo "{answers["compute-apps"]}";;\n'
            f"*clocks_event_reasons*) exit 2;;\n"
            f'*) echo "1980, 1980, 120.5, 40, {answers["memory.used"]}, {answers["reasons"]}";;\nesac\n'
        )
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if answers is not None else str(tmp_path))
    now = gpu_state.sample()
    assert (
        now is None if answers is None else now is not None and (now["clocks.sm"], now["power.draw"]) == (1980, 120.5)
    )
    found = gpu_state.complaints()
    assert len(found) == len(words) and all(word in line for word, line in zip(words, found, strict=True))


def test_missing_packages_are_named_first_and_other_parts_run(tmp_path: Path) -> None:
    with start(tmp_path, "--parts", "check", "vitpar", "--minutes", "0.1", blocked=("pydantic",)) as program:
        printed, _ = program.communicate(timeout=200)
    assert printed.startswith("missing packages: ") and "pydantic" in printed.splitlines()[0]
    assert program.returncode == 1
    runs = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert [run["part"] for run in runs] == ["check", "vitpar"]
    assert runs[0]["ended"] == "left out: there is no pydantic"


def test_every_part_has_programs_and_predictions() -> None:
    for part in PARTS.values():
        for tiny, device in ((True, "cpu"), (False, "cuda")):
            jobs = part.jobs(tiny, device)
            assert jobs and all(job.prediction and device in job.command for job in jobs if job.reads != "pytest")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_call_keeps_its_rows_and_the_next_call_adds_to_them(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    with start(tmp_path, "--parts", "settings") as program:
        while program.poll() is None:
            runs = json.loads(results.read_text())["runs"] if results.exists() else []
            if len(runs) == 2:  # the first setting is measured, the second one is running
                program.send_signal(signal.SIGTERM)
                break
            time.sleep(0.2)
        program.communicate(timeout=60)
    assert program.returncode == 128 + signal.SIGTERM
    kept = json.loads(results.read_text())["runs"]
    assert len(kept[0]["found"]["vitpar"]) == 1 and kept[0]["ended"] == "ended" and kept[1]["ended"] == "running"
    with start(tmp_path, "--parts", "peers", "check") as program:
        printed, _ = program.communicate(timeout=600)
    assert program.returncode == 0, printed
    report = (tmp_path / "report.md").read_text()
    assert all(f"## {part}:" in report for part in ("settings", "peers", "check")) and "| passes | passed |" in report
    assert [run["call"] for run in json.loads(results.read_text())["runs"]] == [0, 0, 1, 1]
