"""Markdown tables of the first run, with predictions and measurements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from bench.gpu_models import MODELS, prediction

Runs = dict[str, dict[str, Any]]
"""Runs of a part, by name of the job."""


def lines(part: str, runs: Runs) -> Iterator[str]:
    """Yield the lines of a part's tables, then how each of its programs ended."""
    makers = {"check": _check, "tests": _tests, "settings": _settings, "fp8": _fp8, "peers": _peers}
    make = makers.get(part.partition("-")[0], _bench)
    try:
        made = list(make({job: run for job, run in runs.items() if run["found"]}))
    except Exception as error:  # results of an interrupted program may be incomplete: this must not end the run
        made = [f"- the table cannot be made ({type(error).__name__}: {error}): see results.json"]
    yield from made
    for job, run in runs.items():
        slow = sorted({reason for state in run.get("gpu", ()) for reason in state["slow"]})
        clocks = [state["clocks.sm"] for state in run.get("gpu", ())]
        clock = f"; clock {min(clocks):.0f} to {max(clocks):.0f} MHz" if clocks else ""
        held = f"; held back by: {', '.join(slow)}" if slow else ""
        yield f"- {job} (call {run['call'] + 1}): {run['ended']} after {run.get('seconds', 0):.0f} s{clock}{held}"
        yield from (f"  - left out: {words}" for words in (run["found"] or {}).get("left_out", ()))
        if run.get("last_lines"):
            yield from ("", "```", *run["last_lines"], "```")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a Markdown table; nothing without rows."""
    if rows:
        yield from (f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows))
        yield ""


def _check(runs: Runs) -> Iterator[str]:
    rows = []
    for run in runs.values():
        found = run["found"]
        worst, words = found["worst"], "passed" if found["passed"] else "failed"
        error = f"{worst['error']:.1e} of {worst['allowed']:.1e} ({worst['name']})"
        rows.append([found["plan"], found["precision"], run["prediction"], words, error])
    yield from table(("plan", "precision", "predicted", "measured", "nearest to its limit"), rows)


def _tests(runs: Runs) -> Iterator[str]:
    for run in runs.values():
        tests = run["found"]["tests"]
        counts = Counter(row["outcome"] for row in tests.values())
        measured = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items())) or "none"
        yield from table(("predicted", "measured"), [[run["prediction"], measured]])
        bad = [[name, row.get("why", "")] for name, row in tests.items() if row["outcome"] in ("failed", "error")]
        yield from table(("failed", "why"), bad)


def _bench(runs: Runs) -> Iterator[str]:
    """Yield the tables of bench_gpu.py: limits, steps with their predictions, and comparisons."""
    found = [run["found"] for run in runs.values()]
    yield from table(
        ("model, batch", "products, TFLOP/s: burst", "sustained", "copy, GB/s"),
        [
            [_name(row), f"{row['burst'] / 1e12:.0f}", f"{row['sustained'] / 1e12:.0f}", f"{row['copy'] / 1e9:.0f}"]
            for one in found
            for row in one["limits"]
        ],
    )
    yield from _steps([row for one in found for row in one["vitpar"]])
    for other in ("plain", "fp8"):
        yield from _turns("vitpar", other, [(_name(row), row) for one in found for row in one[other]])
    yield from _input([row for one in found for row in one["input"]])


def _input(found: list[dict[str, Any]]) -> Iterator[str]:
    rows = []
    for row in found:
        rates = (_rate(row, row["seconds"][name]) for name in ("synthetic", "JPEG"))
        rows.append([_name(row), *rates, f"{row['input_alone']:.0f}"])
    yield from table(("model, batch", "synthetic, images/s", "JPEG, images/s", "input alone, images/s"), rows)


def _steps(found: list[dict[str, Any]]) -> Iterator[str]:
    rows = []
    for row in found:
        model, mfu = MODELS.get(row["model"]), row["mfu"]
        verdict = "–"
        if model and mfu is not None:
            low, high = model.mfu_range
            verdict = "below" if 100 * mfu < low else "above" if 100 * mfu > high else "within"
        rows.append(
            [
                _name(row),
                prediction(row["model"], row["batch_size"]),
                f"{1e3 * _middle(row['seconds']):.1f} ms, MFU {'–' if mfu is None else f'{100 * mfu:.1f} %'}",
                f"{verdict} the range" if verdict != "–" else verdict,
                f"{model.goal:g} %" if model else "–",
                _rate(row, row["seconds"]),
                "–" if row["waits"] is None else f"{row['waits']:g}",
                "–" if row["memory_bytes"] is None else f"{row['memory_bytes'] / 2**30:.1f}",
                str(row["attention"]["backend"]),
            ]
        )
    columns = ("model, batch", "predicted", "measured", "prediction", "goal, MFU", "images/s", "waits a step", "GiB")
    yield from table((*columns, "attention"), rows)


def _settings(runs: Runs) -> Iterator[str]:
    steps = {job: run["found"]["vitpar"][0] for job, run in runs.items() if run["found"]["vitpar"]}
    defaults = [_middle(row["seconds"]) for job, row in steps.items() if job.startswith("default")]
    rows = []
    for job, row in steps.items():
        mine = _middle(row["seconds"])
        gain = f"{100 * (1 - mine / defaults[0]):+.1f} %" if defaults else "–"
        rows.append([job, _name(row), f"{1e3 * mine:.2f}", gain, runs[job]["prediction"]])
    yield from table(("setting", "model, batch", "ms a step", "faster than the first default", "predicted"), rows)


def _fp8(runs: Runs) -> Iterator[str]:
    pairs = [(f"{job}, batch {row['batch_size']}", row) for job, run in runs.items() for row in run["found"]["fp8"]]
    yield from _turns("bf16", "fp8", pairs, next((run["prediction"] for run in runs.values()), ""))


def _turns(first: str, second: str, pairs: list[tuple[str, dict[str, Any]]], predicted: str = "none") -> Iterator[str]:
    """Yield the table of two contenders that took turns. The rows call vitpar's bf16 step vitpar."""
    rows = []
    for name, row in pairs:
        ours, other = (row["seconds"][key] for key in ("vitpar", second))
        ratio = _middle([b / a for a, b in zip(ours, other, strict=True)])
        losses = [f"{row['losses'][key]:.4f}" for key in ("vitpar", second)]
        cells = [f"{1e3 * _middle(ours):.2f}", f"{1e3 * _middle(other):.2f}", f"{100 * (1 - ratio):+.1f} %"]
        rows.append([name, *cells, predicted, *losses])
    faster = f"{second} is faster by"
    last = (f"last loss, {first}", f"last loss, {second}")
    yield from table(("model, batch", f"{first}, ms", f"{second}, ms", faster, "predicted", *last), rows)


def _peers(runs: Runs) -> Iterator[str]:
    for run in runs.values():
        for case in run["found"]["cases"]:
            timed = [row for row in case.get("rows", ()) if row["wall"]]
            ours = next((row for row in timed if row["contender"].startswith("vitpar")), None)
            rows = []
            for row in timed:
                pairs = zip(row["wall"], ours["wall"], strict=False) if ours else ()
                over = f"{_middle([a / b for a, b in pairs]):.3f}" if ours else "–"
                time = f"{1e3 * _middle(row['wall']):.2f}"
                rows.append([row["contender"], row["version"], time, _rate(case, row["wall"]), over])
            yield f"{case['title']} (predicted: {run['prediction']})\n"
            yield from table(("contender", "version", "ms a step", "images/s", "time over vitpar's"), rows)
            yield from (f"- left out: {name}, {why}" for name, why in case.get("left_out", {}).items())


def _name(row: dict[str, Any]) -> str:
    return f"{row['model']}, batch {row['batch_size']}"


def _rate(row: dict[str, Any], seconds: Sequence[float]) -> str:
    """Return images/s as text."""
    return f"{row['batch_size'] / _middle(seconds):.1f}"


def _middle(values: Sequence[float]) -> float:
    return median(values)
