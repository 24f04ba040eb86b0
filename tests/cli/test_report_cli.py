"""`vitpar report` and `vitpar runs` as a user runs them."""

import json
import os
import re
import shutil
import signal
import urllib.request
from pathlib import Path

import pytest

from helpers.command_line import Command, Refused, printed, started
from helpers.html_pages import Page
from helpers.run_folder import rows_of
from helpers.run_folders import eval_row, event, start, train_row, write_run
from helpers.shared_runs import shared_run
from helpers.small_data import CLASSES, VAL
from vitpar_cli.runs import runs


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run that was trained on packed data, and runs that were written by hand."""
    shared = shared_run("small", tmp_path_factory)
    folder = tmp_path_factory.mktemp("report")
    shutil.copytree(shared / "data", folder / "data")
    shutil.copytree(shared / "run", folder / "runs" / "trained")
    assert "report     vitpar report run" in (shared / "printed").read_text().splitlines()
    long = "20260102-030405-vit_small_patch16_224-pp2xtp2xdp2"
    rows = [train_row(1), eval_row(1, top1=1.0)]
    write_run(
        folder / "runs" / long,
        rows,
        mesh="pp2xtp2xdp2",
        events=[start("pp2xtp2xdp2", 300_000), event("error", text="hot")],
    )
    return folder


def test_reports_are_written_with_and_without_validation_images(vitpar: Command, place: Path) -> None:
    done = vitpar("report", "runs/trained")
    assert done.returncode == 0 and re.fullmatch(r"written    report.html  \(\d\.\d\d MB\)\n", done.stdout), done
    page = Page((place / "report.html").read_text())
    assert "complete" in page.text and "vitpar report runs/trained" in page.text and page.outside == []
    done = vitpar("report", "runs/trained", "--images", "5", "--out", "images.html", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    page = Page((place / "images.html").read_text())
    assert len(page.all("img")) >= 5 and f"on {VAL} images" in page.text
    top1 = rows_of(place / "runs" / "trained", "eval")[-1]["top1"]
    assert f"Top-1 accuracy {top1 * 100:.1f} %" in page.text
    assert all(f"class{number}" in page.text for number in range(CLASSES))


def test_runs_are_listed_in_80_columns(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    shown = printed(runs)
    lines = shown.splitlines()
    assert max(map(len, lines[:-1])) <= 80, shown
    assert lines[2].split()[:6] == ["state", "steps", "loss", "top-1", "samples/s", "age"]
    assert "      vit_custom under pp2xtp2xdp2 on digits" in lines
    assert "trained: vit_custom under dp1 on data" in shown
    assert "complete" in shown and "1/300k" in shown
    assert lines[-1] == "20260102-030405-vit_small_patch16_224-pp2xtp2xdp2: hot"
    found = json.loads(printed(runs, "runs", "--json"))
    assert {one["name"]: one["state"] for one in found["runs"]}["trained"] == "complete"
    assert printed(runs, "data") == "no runs in data\n"


def test_a_live_report_ends_with_ctrl_c(place: Path) -> None:
    process = started(place, ("report", "runs/trained", "--live", "--port", "0"))
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = re.findall(r"http://127.0.0.1:\d+/", line)[0]
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert "complete" in Page(answer.read().decode()).text
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 0 and err == ""


MISTAKES = [
    (["report", "data"], "'data' is not the folder of a run (log.txt is missing): see `vitpar runs`"),
    (["report", *["runs/trained"] * 7], "a report shows at most 6 runs but 7 are named: name fewer"),
    (["report", "runs/trained", "--live", "--out", "x.html"], "--out does nothing with --live"),
    (["report", "runs/trained", "--live", "--images", "3"], "--images does nothing with --live"),
    (["report", "runs/trained", "--port", "80"], "--port does nothing without --live"),
    (["report", "runs/trained", "--data", "data"], "--data does nothing without --images"),
    (["report", "runs/trained", "--images", "201"], "--images is 201: use at most 200"),
    (["report", "runs/trained", "runs/trained", "--images", "1"], "--images shows the predictions of one run"),
    (["report", "runs/trained", "--out", "gone/x.html"], "cannot write gone/x.html"),
]


def test_mistakes_are_refused(place: Path, refused: Refused) -> None:
    refused(place, MISTAKES)
