"""Pages of reports: well-formed, self-contained, small, and good for odd runs."""

import fcntl
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from helpers.html_pages import Page, data_of
from helpers.run_folders import eval_row, event, start, train_row, write_run
from vitpar.runs.charts import waiting_share
from vitpar.runs.folder import RunRecord
from vitpar.runs.page import report

CURVES = ("Loss", "Top-1", "Top-5", "Learning rate", "Gradient norm, before clipping", "Samples/s")
SCRIPTS = 3  # one that runs, two of data
CURVES += ("Time waiting for data", "Peak memory of rank 0, GB")


def usual_rows(steps: int = 60, **changed: Any) -> list[dict[str, Any]]:
    rows = [train_row(step, **changed) for step in range(1, steps + 1)]
    return rows + [eval_row(step) for step in range(15, steps + 1, 15)]


def page_of(*runs: Path, **more: Any) -> tuple[Page, str]:
    html = report([RunRecord(path) for path in runs], **more)
    return Page(html), html


def titles(page: Page, html: str) -> list[str]:
    return re.findall("<figcaption>(.*?)</figcaption>", html)


def plots(page: Page) -> list[dict[str, str | None]]:
    """Return the attributes of the places of charts."""
    return [one for one in page.all("div") if one.get("class") == "plot"]


def label(page: Page, title: str) -> str:
    """Return the description of the chart called `title`."""
    (found,) = [text for plot in plots(page) if (text := plot["aria-label"]) and text.startswith(f"{title}. ")]
    return found


def test_a_report_is_one_file_that_loads_nothing(tmp_path: Path) -> None:
    page, _ = page_of(write_run(tmp_path / "mine", usual_rows()), made_by="vitpar 1.2.3: vitpar report mine")
    assert page.outside == [] and not page.all("link") and not page.all("iframe")
    (policy,) = [meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policy and "default-src 'none'" in policy and "'unsafe-eval'" not in policy
    assert "script-src 'sha256-" in policy and "connect-src 'none'" in policy and "'self'" not in policy
    assert "vitpar 1.2.3" in page.text and len(page.all("script")) == SCRIPTS


def test_the_summary_has_results_versions_and_commands(tmp_path: Path) -> None:
    run = write_run(tmp_path / "mine", usual_rows(), mesh="dp2", attention={"backend": "math"}, compiled=False)
    page, html = page_of(run)
    for words in (
        *("complete", "loss 0.5856, top\u20111 87.0 %, top\u20115 99.0 %", "87.0 % after step 60"),
        *("1,280 samples/s on average", "1 GB at most on rank 0", "2 ranks of cpu (2 cores)"),
        "1,437 training and 360 validation images",
        *(f"vitpar train --recipe {run}/recipe.toml --mesh {run}/plan.json", "started by vitpar train --mesh dp2"),
        *("torch 2.13.0", "Plan dp2 0 dp 0 1 dp 1", "train steps = 60 complete recipe [model]", "attention math"),
        "not compiled",
    ):
        assert words in page.text, words
    assert "top\u20111&nbsp;87.0&nbsp;%, top\u20115&nbsp;99.0&nbsp;%" in html, "no line break before a unit"
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (start("dp2", 60), event("done"))))
    for name, text in (("recipe.toml", "[[["), ("plan.json", '{"pp": []}'), ("env.json", "[1]")):
        (run / name).write_text(text)
    assert "complete" in page_of(run)[0].text


def test_every_metric_has_a_chart_with_words(tmp_path: Path) -> None:
    page, html = page_of(write_run(tmp_path / "mine", usual_rows()))
    assert titles(page, html) == list(CURVES)
    assert all(plot["role"] == "img" and plot["aria-label"] for plot in plots(page))
    assert label(page, "Loss") == (
        "Loss. training: first 2.3000 at step 1, lowest 0.6734 at step 60, highest 2.3000 at step 1, last 0.6734 at "
        "step 60, missing 0. validation: first 0.8876 at step 15, lowest 0.5856 at step 60, highest 0.8876 at step 15, "
        "last 0.5856 at step 60, missing 0."
    )
    recorded = usual_rows(mfu=0.4, loss_scale=1024.0)
    page, html = page_of(write_run(tmp_path / "gpu", recorded))
    assert set(titles(page, html)) == {*CURVES, "Model FLOPs utilisation (MFU)", "Loss scale"}


def test_groups_of_layers_and_ranks_are_shown_for_one_run(tmp_path: Path) -> None:
    def rows(**last: Any) -> list[dict[str, Any]]:
        groups = {"embed": 0.5, "<i>head": 2.0}
        return [train_row(step, **({"grad_norms": groups} if step % 5 == 0 else {})) for step in range(1, 15)] + [
            train_row(15, grad_norms=groups, update_ratios={"embed": 1e-3}, **last)
        ]

    one = write_run(tmp_path / "one", rows(memory_by_rank=[10**9, 3 * 10**9], gpu_watts=1400.0))
    page, html = page_of(one)
    by_layers = [title for title in titles(page, html) if "by layers" in title]
    assert by_layers == ["Gradient norm by layers, before clipping", "Update relative to the weights, by layers"]
    assert "embed: first 0.5 at step 5, lowest 0.5 at step 5" in label(page, by_layers[0])
    drawn = {chart["title"]: chart for chart in data_of(html)["charts"]}
    assert [line["name"] for line in drawn[by_layers[0]]["lines"]] == ["embed", "<i>head"]
    assert [line["x"]["step"] for line in drawn[by_layers[1]]["lines"]] == [[15]]
    assert "&lt;i&gt;head" in html and "<i>head" not in html and "Power of all GPUs" in html
    assert "at most 3&nbsp;GB on rank 1, 1&nbsp;GB on rank 0" in html
    two, html = page_of(one, write_run(tmp_path / "two", rows()))
    assert not [title for title in titles(two, html) if "by layers" in title], "too many lines"


def test_runs_are_overlaid_with_their_differences(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / mesh, usual_rows(), mesh=mesh) for mesh in ("dp2", "tp2", "fsdp2")]
    recipe = runs[1] / "recipe.toml"
    recipe.write_text(recipe.read_text() + 'seed = 3\n[optimizer]\nname = "lamb"\n')
    page, html = page_of(*runs)
    assert html.count("<figcaption>") == len(CURVES)
    assert (
        "setting ■ 1 dp2 ■ 2 tp2 ■ 3 fsdp2 train.seed not set 3 not set optimizer.name not set lamb not set"
        in page.text
    )
    for number in range(3):
        assert f"run {number + 1}, validation: first" in label(page, "Loss")
    alike = page_of(runs[0], runs[2])[0].text
    assert "Differences between the recipes All settings are equal." in alike


def test_texts_of_files_are_escaped(tmp_path: Path) -> None:
    hostile = '<img src=x onerror="alert(1)"></script><script>alert(1)</script>"\'&'
    folder = hostile.replace("/", "\u2215")
    events = [start("dp2", 60) | {"model": hostile}, event("warning", text=hostile), event("error", text=hostile)]
    about = {"git_commit": hostile, "torch": hostile, "command": ["vitpar", hostile], "devices": [hostile]}
    run = write_run(tmp_path / folder, usual_rows(), events=events, **about, attention={"backend": hostile})
    other = write_run(tmp_path / "other", usual_rows())
    recipe = f"[data]\npath = {json.dumps(hostile)}\n[optimizer]\nname = {json.dumps(hostile)}\n"
    (run / "recipe.toml").write_text(recipe)
    page, _ = page_of(run, other, made_by=hostile, version=hostile)
    assert len(page.all("script")) == SCRIPTS and not page.all("img") and page.outside == []
    assert page.text.count(hostile) > 5


ODD: dict[str, tuple[list[Any], str]] = {
    "none": ([], "No step has been recorded yet."),
    "one": ([train_row(1)], "steps 1 of 60"),
    "cut off": ([train_row(1), "{"], "1 line of metrics.jsonl cannot be read"),
    "skipped": ([train_row(1, loss=None, skipped=True), train_row(2)], "1 step skipped, 1 step without a finite loss"),
    "inf": ([train_row(1), json.dumps(train_row(2, loss=float("inf")))], "1 step without a finite loss"),
    "infinite": (
        ['{"kind": "train", "step": 7, "skipped": 1e999, "memory_bytes": -1e999, "step_ms": 0}'],
        "1 step skip",
    ),
    "zeros": ([train_row(1, loss=0.0, lr=0.0, grad_norm=0.0), train_row(2, loss=0.0, lr=0.0)], "training loss 0.0000"),
    "untimed": ([train_row(step, step_ms=None, samples=None) for step in (1, 2, 3)], "steps 3 of 60"),
    "gaps": ([train_row(step) for step in (1, 2, 30, 31, 900)], "steps 900"),
}


def test_odd_runs_have_good_pages(tmp_path: Path) -> None:
    for kind, (rows, expected) in ODD.items():
        page, html = page_of(write_run(tmp_path / kind, rows, events=[start("dp2", 60)]))
        assert expected in page.text, kind
        assert data_of(html)["colours"]


def test_a_resumed_run_marks_checkpoints_and_restarts(tmp_path: Path) -> None:
    events = [start("dp2", 60), event("save", 20), start("tp2", 60, 20, "optimizer.lr was 1 and is 2")]
    events += [event("save", 40), event("save", 60), event("done", 60)]
    commands = [[0, ["vitpar", "train", "--mesh", "dp2"]], [20, ["vitpar", "train", "--resume", "a b"]], "odd", [1, 2]]
    page, _ = page_of(write_run(tmp_path / "mine", usual_rows(), events=events, mesh="tp2", commands=commands))
    assert "restarts after step 20 under tp2 : optimizer.lr was 1 and is 2" in page.text and "3 saved" in page.text
    assert "started by vitpar train --mesh dp2 after step 20 vitpar train --resume 'a b'" in page.text


def test_the_plan_is_drawn(tmp_path: Path) -> None:
    for mesh, microbatches, expected in (
        ("pp2xdp2", 4, "1f1b, 4 micro-batches, in theory 20.0 % of the time idle"),
        ("pp2", 2**20, "1,048,576 micro-batches in 2 stages: too many to draw"),
        ("pp8xdp8192", 1, "65,536 ranks: too many to draw"),
        ("pp8", 2, "cannot be drawn: 4 blocks cannot fill 8 stages"),
    ):
        page, _ = page_of(write_run(tmp_path / mesh, [train_row(1)], mesh=mesh, microbatches=microbatches))
        assert expected in page.text, mesh


def test_states_and_waits_follow_from_the_files(tmp_path: Path) -> None:
    for state, end in {"complete": "done", "stopped": "stopped", "failed": "error"}.items():
        assert RunRecord(write_run(tmp_path / state, [], events=[start("dp2", 60), event(end)])).state == state
    old = write_run(tmp_path / "old", [train_row(1)], events=[])  # of a vitpar that wrote no events
    assert RunRecord(old).state == "failed" and "wrote no events" in RunRecord(old).note
    (old / "weights").mkdir()
    assert RunRecord(old).state == "complete" and "wrote no events" in page_of(old)[0].text
    run = write_run(tmp_path / "open", [], events=[start("dp2", 60)])
    assert RunRecord(run).state == "failed" and "killed" in RunRecord(run).note
    with (run / "log.txt").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert RunRecord(run).state == "running"
    # The time of a step is the mean of its interval, so a long wait of one step is not more than its time.
    rows = [train_row(1, step_ms=200.0, data_ms=50.0), train_row(2, data_ms=10.0), train_row(3, data_ms=150.0)]
    share = waiting_share(RunRecord(write_run(tmp_path / "waits", [*rows, train_row(4, step_ms=50.0, data_ms=99.0)])))
    np.testing.assert_allclose(share, [0.25, 0.8, 0.8, 1.0])
