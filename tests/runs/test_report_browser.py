"""Reports in headless Chromium: values under the pointer, zoom, switches, themes, widths, markup that stays inert."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from helpers.browser import CUT, DRAWN, Tab, shown
from helpers.run_folders import eval_row, event, start, train_row, write_run
from vitpar.runs import live
from vitpar.runs.folder import RunRecord
from vitpar.runs.live import LiveReport
from vitpar.runs.page import report

pytestmark = pytest.mark.slow
RANGES = "[...document.querySelectorAll('.charts .plot')].map(plot => plot._fullLayout.xaxis.range)"
LOSS = "document.querySelector('.plot')"


def run_at(folder: Path, steps: int = 300, mesh: str = "pp2xdp2", **changed: Any) -> Path:
    rows = [
        train_row(step, mfu=0.123, loss_scale=65536.0, step_ms=1e5 + step, **changed) for step in range(1, steps + 1)
    ]
    events = [start(mesh, steps), *(event("save", step) for step in range(50, steps + 1, 50)), event("done", steps)]
    rows += [eval_row(step) for step in range(50, steps + 1, 50)]
    return write_run(folder, rows, mesh=mesh, events=events, microbatches=4)


def place(tab: Tab, share: float) -> tuple[float, float]:
    """Return a point in the first chart. share: its position from left to right."""
    x, y, width, height = tab.box(LOSS)
    return x + share * width, y + 0.5 * height


def drag(tab: Tab, start: float, end: float) -> None:
    """Zoom into a part of the first chart."""
    points = place(tab, start), place(tab, end)
    tab.run(f"delete {DRAWN}")
    tab.drag(*points)
    tab.wait(DRAWN)


@pytest.mark.parametrize(("width", "dark"), [(390, False), (1280, True)])
def test_a_report_fits_and_follows_the_theme(width: int, dark: bool, chrome: Browser, tmp_path: Path) -> None:
    runs = [RunRecord(run_at(tmp_path / name)) for name in ("one", "another-run-with-a-long-name")]
    html = report(runs, made_by="vitpar")
    tab = shown(chrome, html, tmp_path, width=width, dark=dark)
    assert tab.run("document.querySelectorAll('.plot .nsewdrag').length") == html.count("<figcaption>") == 11
    for _ in range(2):
        assert tab.run("document.documentElement.scrollWidth <= innerWidth") and tab.run("innerWidth") == width
        assert tab.run(CUT) == []
        page, text, line = (
            tab.run(script)
            for script in (
                "getComputedStyle(document.body).backgroundColor",
                f"getComputedStyle({LOSS}.querySelector('.xtick text')).fill",
                f"{LOSS}.data.find(line => line.name === 'run 1').line.color",
            )
        )
        light = ("rgb(255, 255, 255)", "rgb(0, 0, 0)", "#2f5bd0")
        assert (page, text, line) == (("rgb(18, 20, 22)", "rgb(255, 255, 255)", "#5b8cff") if dark else light)
        dark = not dark
        tab.press("theme-dark" if dark else "theme-light")
    assert tab.complaints == []


def test_the_pointer_shows_all_values_at_a_step(chrome: Browser, tmp_path: Path) -> None:
    one, two = run_at(tmp_path / "one", 100), run_at(tmp_path / "two", 100)  # their lines are equal
    tab = shown(chrome, report([RunRecord(one), RunRecord(two)]), tmp_path)

    expected = f"{train_row(50)['loss']:.4f}", f"{eval_row(50)['loss']:.4f}"
    found = tab.hovered(*place(tab, 0.5))
    assert found[0] == "step 50" and found[-1] == "checkpoint after step 50"
    assert [text.split(" (")[0] for text in found[1:3]] == [f"run {number} : {expected[0]}" for number in (1, 2)]
    assert found[3:5] == [f"run {number}, validation : {expected[1]} at step 50" for number in (1, 2)]
    widths = tab.run(f"{LOSS}.data.filter(line => line.customdata).map(line => line.line.width)")
    assert widths[0] > widths[1] + 2, "equal lines are all visible"
    tab.page.mouse.move(1, 1)
    tab.press("smooth-off")
    tab.press("x-samples")
    assert tab.hovered(*place(tab, 0.5))[:2] == ["6,400 samples", f"run 1 : {expected[0]}"]


def test_zoom_is_that_of_all_charts_until_it_is_reset(chrome: Browser, tmp_path: Path) -> None:
    tab = shown(chrome, report([RunRecord(run_at(tmp_path / "one"))]), tmp_path)
    complete = tab.run(RANGES)
    assert len({tuple(one) for one in complete}) == 1
    drag(tab, 0.25, 0.75)
    zoomed = tab.run(RANGES)
    assert len({tuple(one) for one in zoomed}) == 1
    low, high = complete[0]
    assert zoomed[0] == pytest.approx([low + (high - low) / 4, low + 3 * (high - low) / 4], abs=3)
    tab.press("theme-dark")
    assert tab.run(RANGES) == zoomed
    drag(tab, 0.50, 0.52)
    low, high = tab.run(RANGES)[0]
    assert high - low < 8 and tab.run(f"{LOSS}._fullLayout.xaxis.dtick") == 1, "a step has no fractions"
    x, y = place(tab, 0.5)
    tab.run(f"delete {DRAWN}")
    tab.page.mouse.dblclick(x, y)
    tab.wait(DRAWN)
    assert tab.run(RANGES) == complete


def test_switches_choose_lines_axes_and_scales(chrome: Browser, tmp_path: Path) -> None:
    runs = [RunRecord(run_at(tmp_path / name, loss=loss)) for name, loss in (("one", 1.0), ("two", 2.0))]
    tab = shown(chrome, report(runs), tmp_path)
    lines = f"{LOSS}.data.filter(line => line.visible && line.name).map(line => line.name)"
    both = ["run 1", "run 2", "run 1, validation", "run 2, validation"]
    tab.press("smooth-off")
    assert sorted(tab.run(lines)) == sorted(both)
    tab.press("run-1")
    assert sorted(tab.run(lines)) == [both[0], both[2]]
    tab.press("kind-training")
    assert tab.run(lines) == [both[2]]
    tab.press("run-1")
    tab.press("kind-training")
    symbols = f"{LOSS}.querySelectorAll('.scatterlayer .trace.scatter path.point').length"
    dots = tab.run(symbols)
    tab.press("marks")
    assert tab.run(symbols) == dots - 12, "6 checkpoints of each run"
    for name, scale in (("log", "log"), ("linear", "linear"), ("usual", "linear")):
        tab.press(f"scale-{name}")
        assert tab.run(f"{LOSS}._fullLayout.yaxis.type") == scale
    tab.press("x-hours")
    assert tab.run(f"{LOSS}._fullLayout.xaxis.title.text") == "hours of training"
    assert tab.run(RANGES)[0][1] == pytest.approx(sum(1e5 + step for step in range(1, 301)) / 3.6e6, rel=0.02)


def test_long_runs_keep_spikes_and_gaps(chrome: Browser, tmp_path: Path) -> None:
    rows = [train_row(step, loss=1.0 if step < 6000 or step > 6500 else None) for step in range(1, 10_001)]
    rows[1234]["loss"] = 40.0
    html = report([RunRecord(write_run(tmp_path / "one", rows, steps=10_000))] * 3)
    assert len(html.encode()) < 6e6
    tab = shown(chrome, html, tmp_path)
    y, x = tab.run(f"[{LOSS}.data[0].y, {LOSS}.data[0].x]")
    assert x[y.index(40.0)] == 1235 and len(y) < 3000
    assert y.count(None) == 1 and not any(6000 <= step <= 6500 for step in x if step is not None)


HOSTILE = (
    '<a href="https://x.invalid">a</a><img src=x onerror="document.title=1"></script><script>document.title=2</script>'
)


def test_markup_from_files_stays_inert(chrome: Browser, tmp_path: Path) -> None:
    metric = {"name": "top1", "title": HOSTILE, "share": True, "higher": True}
    events = [start(HOSTILE, 60), start(HOSTILE, 60, 20), event("warning", text=HOSTILE)]
    rows = [*map(train_row, range(1, 61)), eval_row(30), eval_row(60)]
    run = write_run(tmp_path / HOSTILE.replace("/", "\u2215"), rows, events=events, metrics=[metric], torch=HOSTILE)
    html = report([RunRecord(run), RunRecord(run)], made_by=HOSTILE)
    tab = shown(chrome, html, tmp_path)
    for share in (0.33, 0.34):  # the restart, whose words are those of a file
        tab.page.mouse.move(*place(tab, share))
    words = tab.wait(
        "[...document.querySelectorAll('.hoverlayer text')].map(text => text.textContent).find(text => "
        "text.startsWith('resumed'))"
    )
    assert words.startswith("resumed after 20 steps under <a href=")
    assert not tab.run("document.querySelector('img, a, iframe')") and tab.run("document.title").startswith("vitpar")
    assert tab.run("document.scripts.length") == 4, "data, library packed and unpacked, and the page's script"
    assert tab.run("performance.getEntriesByType('resource').length") == 0 and tab.complaints == []


def test_a_script_that_was_not_escaped_would_not_run(chrome: Browser, tmp_path: Path) -> None:
    html = report([RunRecord(run_at(tmp_path / "one", 60))])
    attack = "<script>document.body.dataset.stolen = 'yes'</script><img src='https://example.invalid/x'></body>"
    tab = shown(chrome, html.replace("</body>", attack), tmp_path)
    assert tab.run("document.body.dataset.stolen ?? 'no'") == "no"
    assert sum("Content Security Policy" in text for text in tab.complaints) >= 2


def test_a_board_is_sorted_and_keeps_what_is_marked(
    chrome: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "REST", 0.0)
    for name, loss in (("one", 0.5), ("two", 0.1), ("three", 0.3)):
        write_run(tmp_path / name, [train_row(1), eval_row(1, loss=loss)])
    names = "[...document.querySelectorAll('.runs td:nth-child(2)')].map(cell => cell.textContent).join()"
    with LiveReport(tmp_path, 0) as server:
        thread = threading.Thread(target=server.run)
        thread.start()
        tab = Tab(chrome, server.url)
        tab.page.click("th button >> text=loss")
        assert tab.run(names) == "two,three,one"
        tab.page.click("th button >> text=loss")
        assert tab.run(names) == "one,three,two"
        for name in ("one", "two"):
            tab.page.check(f"[id='board/{name}']")
        write_run(tmp_path / "four", [train_row(1), eval_row(1, loss=0.2)])
        tab.wait(f"{names} === 'one,three,four,two'")
        tab.page.click("text=compare up to")
        tab.wait(DRAWN)
        assert "2 runs" in tab.run("document.querySelector('h1').textContent") and tab.complaints == []
        server.shutdown()
        thread.join()


def test_a_live_page_updates_itself(chrome: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "REST", 0.0)
    run = write_run(tmp_path / "mine", [train_row(step) for step in range(1, 41)], events=[start("dp2", 60)])
    with LiveReport([run], 0) as server:
        thread = threading.Thread(target=server.run)
        thread.start()
        tab = Tab(chrome, server.url)
        tab.wait(DRAWN)
        charts = tab.run("window.same = document.querySelector('.plot'); document.querySelectorAll('.plot').length")
        tab.press("smooth-off")
        tab.run("document.querySelector('details').open = true")
        drag(tab, 0.25, 0.75)
        zoomed = tab.run(RANGES)[0]
        with (run / "metrics.jsonl").open("a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in (*map(train_row, range(41, 51)), eval_row(50))))
        tab.wait("document.querySelector('main').innerText.includes('50 of 60')")
        tab.wait(f"{LOSS}.data[0].y.length === 50")
        tab.wait(f"document.querySelectorAll('.plot .nsewdrag').length === {charts + 2}")
        assert tab.run(RANGES) == [zoomed] * (charts + 2), "of new charts too"
        assert tab.run("same === document.querySelector('.plot') && document.querySelector('details').open")
        assert tab.run("document.getElementById('smooth-off').checked") and tab.complaints == []
        server.shutdown()
        thread.join()
