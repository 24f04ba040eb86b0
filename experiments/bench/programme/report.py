"""Report of a programme: measurements with predictions, then how each program ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from bench.gpu_models import card_of
from bench.harness import Spread, table
from bench.programme.compared import COLUMNS, FAR, Compared, of, rates, steps
from vitpar.planner.profile.cluster import Cluster, find_cluster

Runs = dict[str, dict[str, Any]]
"""Runs by the name of their job."""
_NOT_MEASURED = ("step", "seconds", "samples")
"""Fields of an evaluation that are no metrics."""


def report(results: dict[str, Any]) -> str:
    """Return the report in Markdown. results: calls and runs (``bench.programme.results.merged``)."""
    name = next((call["hardware"] for call in results["calls"] if call.get("cuda")), "")
    card = card_of(name)
    sheet = find_cluster(f"1x{card}") if card else None
    runs: Runs = {run["job"]: run for run in results["runs"]}
    return "\n".join(_lines(results, runs, sheet, card, name)) + "\n"


def _lines(results: dict[str, Any], runs: Runs, sheet: Cluster | None, card: str | None, name: str) -> Iterator[str]:
    yield f"# {name or 'Rehearsal without a GPU'}\n"
    if card is None:
        yield "No predictions are for this device.\n"
    for number, facts in enumerate(results["calls"], start=1):
        yield f"Call {number}:\n"
        yield from (f"- {key}: {value}" for key, value in facts.items() if key != "cuda")
        yield ""
    if sheet is not None:
        rows = [*_compared(runs, sheet, card)]
        far = sum(row.far for row in rows)
        yield "## Measured and predicted\n"
        yield f"{far} of {len(rows)} figures are more than {100 * FAR:.0f} % from their prediction, marked **!**.\n"
        yield from table(COLUMNS, [row.cells() for row in rows])
    for title, make in SECTIONS.items():
        if made := [*make(runs)]:
            yield from (f"## {title}\n", *made)
            if made[-1]:
                yield ""
    yield "## Programs\n"
    for job, run in runs.items():
        yield _ended(job, run)
        yield from (f"  - left out: {words}" for words in (run["found"] or {}).get("left_out", ()))
        if run.get("last_lines"):
            yield from ("", "```", *run["last_lines"], "```")


def _compared(runs: Runs, sheet: Cluster, card: str | None) -> Iterator[Compared]:
    yield from rates(_found(runs, "micro").get("rows", ()), sheet)
    yield from steps(_found(runs, "steps").get("vitpar", ()), sheet, card)


def _ended(job: str, run: dict[str, Any]) -> str:
    samples = run.get("gpu", ())
    clocks = [sample["clocks.sm"] for sample in samples]
    slow = sorted({reason for sample in samples for reason in sample["slow"]})
    clock = f"; clock {min(clocks):.0f} to {max(clocks):.0f} MHz" if clocks else ""
    held = f"; held back by: {', '.join(slow)}" if slow else ""
    return f"- {job} (call {run['call'] + 1}): {run['ended']} after {run.get('seconds', 0):.0f} s{clock}{held}"


def _checks(runs: Runs) -> Iterator[str]:
    rows = []
    for job, run in runs.items():
        if job.startswith("check") and (found := run["found"]):
            worst = found["worst"]
            error = f"{worst['error']:.1e} of {worst['allowed']:.1e} ({worst['name']})"
            rows.append([job, run["prediction"], "passed" if found["passed"] else "**failed**", error])
    yield from table(("check", "predicted", "measured", "nearest to its limit"), rows)


def _tests(runs: Runs) -> Iterator[str]:
    for job, run in runs.items():
        if job.startswith("tests") and (found := run["found"]):
            measured = ", ".join(f"{number} {outcome}" for outcome, number in sorted(found["counts"].items())) or "none"
            yield from table(("tests", "predicted", "measured"), [[job, run["prediction"], measured]])
            yield from table(("failed", "why"), [[name, _one_line(why)] for name, why in found["failed"].items()])


def _steps(runs: Runs) -> Iterator[str]:
    rows = []
    jobs = [job for job in runs if job.startswith("steps")]
    for name, row in ((job, row) for job in jobs for row in _found(runs, job).get("vitpar", ())):
        seconds, kernels, memory = median(row["seconds"]), row["kernels"], row["memory_bytes"]
        cells = [
            f"{1e3 * seconds:.1f}",
            f"{row['batch_size'] / seconds:.0f}",
            row["mfu"] is not None and f"{100 * row['mfu']:.1f} %",
            row["waits"] is not None and f"{row['waits']:g}",
            kernels and f"{kernels[0]:.0f}",
            kernels and f"{100 * kernels[1] / seconds:.0f} %",
            memory is not None and f"{memory / 2**30:.1f}",
            str(row["attention"]["backend"]),
        ]
        rows.append([name, _named(row), *(cell or "–" for cell in cells)])
    columns = ("program", "model, batch", "ms", "images/s", "MFU", "waits", "kernels", "GPU busy", "GiB", "attention")
    yield from table(columns, rows)


def _products(runs: Runs) -> Iterator[str]:
    """Yield the table of ``vitpar bench``, with the time of each phase and of each part of the start."""
    rows = []
    for job, run in runs.items():
        if "phased_step_seconds" not in (run["found"] or {}):
            continue
        found = run["found"]
        phases = ", ".join(f"{phase['name']} {1e3 * phase['seconds']['mean']:.1f}" for phase in found["phases"])
        data = found.get("data")
        cells = [
            f"{1e3 * found['step_seconds']['mean']:.1f}",
            data and f"{1e3 * data['synthetic_step_seconds']['mean']:.1f}",
            f"{found['images_per_second']['mean']:.0f}",
            found["mfu"] is not None and f"{100 * _mean(found['mfu']):.1f} %",
            f"{found['memory_bytes'] / 2**30:.1f}",
            str(found["attention"]),
        ]
        start = ", ".join(f"{part} {seconds:.1f}" for part, seconds in found.get("start_seconds", {}).items())
        rows.append([job, f"{_named(found)}", run["prediction"], *(cell or "–" for cell in cells), phases, start])
    columns = ("program", "model, batch", "predicted", "ms", "ms without data")
    columns = (*columns, "samples/s", "MFU", "GiB", "attention", "phases, ms", "start, s")
    yield from table(columns, rows)


def _epilogues(runs: Runs) -> Iterator[str]:
    rows = of(_found(runs, "micro").get("rows", ()), "epilogue")
    cells = [[row["model"], *(f"{1e3 * row[key]:.3f}" for key in ("plain_seconds", "seconds"))] for row in rows]
    yield from table(("model", "product, then tanh-GELU, ms", "tanh-GELU in the epilogue, ms"), cells)


def _attention(runs: Runs) -> Iterator[str]:
    rows = []
    for row in of(_found(runs, "micro").get("rows", ()), "attention"):
        rates = (f"{row['flops'] * n / row[key] / 1e12:.0f}" for key, n in (("forward", 1), ("backward", 2.5)))
        repeats = "yes" if row["repeatable"] else "**no**"
        rows.append([" x ".join(map(str, row["shape"])), row["kernel"], *rates, repeats])
    columns = ("batch x heads x tokens x features", "kernel", "forward, TFLOP/s", "backward, TFLOP/s")
    yield from table((*columns, "backward repeats bit by bit"), rows)


def _errors(runs: Runs) -> Iterator[str]:
    for row in _found(runs, "micro").get("rows", ()):
        if "error" in row:
            facts = ", ".join(f"{key} {value}" for key, value in row.items() if key not in ("error", "flops", "widest"))
            yield f"- {facts}: {_one_line(row['error'])}"


def _turns(runs: Runs) -> Iterator[str]:
    """Yield the tables of contenders that took turns: fp8 and JPEG input with vitpar's bf16 step."""
    rows = []
    for job, other in (("fp8", "fp8"), ("JPEG", "input")):
        for row in _found(runs, job).get(other, ()):
            first, second = row["seconds"].values()
            times = (f"{1e3 * median(seconds):.1f}" for seconds in (first, second))
            rows.append([row.get("feed", job), _named(row), *times, _over(second, first), runs[job]["prediction"]])
    yield from table(("comparison", "model, batch", "without, ms", "with, ms", "with over without", "predicted"), rows)


def _peers(runs: Runs) -> Iterator[str]:
    for job, run in runs.items():
        for case in (run["found"] or {}).get("cases", ()) if job.startswith("peers") else ():
            timed = [row for row in case.get("rows", ()) if row["wall"]]
            ours = next((row["wall"] for row in timed if row["contender"].startswith("vitpar")), [])
            rows = []
            for row in timed:
                seconds = median(row["wall"])
                speeds = (f"{1e3 * seconds:.1f}", f"{case['batch_size'] / seconds:.0f}")
                rows.append([row["contender"], row["version"], *speeds, _over(row["wall"], ours)])
            yield f"{case['title']} (predicted: {run['prediction']})\n"
            yield from table(("contender", "version", "ms a step", "images/s", "time over vitpar's"), rows)
            yield from (f"- left out: {name}, {why}" for name, why in case.get("left_out", {}).items())


def _trainings(runs: Runs) -> Iterator[str]:
    """Yield the evaluations of each training on CIFAR-10."""
    for job, run in runs.items():
        found = run["found"] or {}
        if rows := found.get("evaluations"):
            yield f"{job} (predicted: {run['prediction']}): {found['images_per_second']:,.0f} images/s at the end\n"
            names = [name for name, value in rows[0].items() if name not in _NOT_MEASURED and isinstance(value, float)]
            cells = [
                [f"{row['step']:,}", f"{row['seconds']:.0f}", *(f"{row[name]:.4g}" for name in names)] for row in rows
            ]
            yield from table(("step", "seconds", *names), cells)


def _small(runs: Runs) -> Iterator[str]:
    """Yield the images that a GPU augments in a second."""
    found = _found(runs, "small images")
    measured = next((rows for name, rows in found.items() if name.startswith("images/s")), ())
    rows = [
        [row["augmentation"], runs["small images"]["prediction"], Spread.of(row["rates"]).text(0)] for row in measured
    ]
    yield from table(("augmentation", "predicted", "images/s"), rows)


def _validated(runs: Runs) -> Iterator[str]:
    rows = []
    for row in _found(runs, "validate").get("rows", ()):
        seconds = (row["predicted_seconds"], row["measured_seconds"])
        memory = (row["predicted_memory_bytes"], max(row["measured_memory_bytes"]))
        cells = [*(f"{1e3 * one:.1f}" for one in seconds), *(f"{one / 2**30:.2f}" for one in memory)]
        rows.append([row["strategy"], *cells, runs["validate"]["prediction"]])
    columns = ("plan", "predicted, ms", "measured, ms", "predicted, GiB", "measured, GiB", "expected error")
    yield from table(columns, rows)


SECTIONS = {
    "Checks": _checks,
    "Tests": _tests,
    "Steps": _steps,
    "Steps by vitpar bench": _products,
    "Attention": _attention,
    "GELU in the epilogue": _epilogues,
    "Comparisons": _turns,
    "Other loops": _peers,
    "Small images": _small,
    "CIFAR-10": _trainings,
    "Plans": _validated,
    "Not measured": _errors,
}


def _found(runs: Runs, job: str) -> dict[str, Any]:
    return runs.get(job, {}).get("found") or {}


def _named(row: dict[str, Any]) -> str:
    return f"{row['model']}, batch {row['batch_size']}"


def _over(seconds: Sequence[float], others: Sequence[float]) -> str:
    """Return the median ratio of times that were measured in turn, which a late end may have cut short."""
    ratios = [a / b for a, b in zip(seconds, others, strict=False)]
    return f"{median(ratios):.3f}" if ratios else "–"


def _mean(figure: Any) -> float:
    return figure["mean"] if isinstance(figure, dict) else figure


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200].replace("|", "/")
