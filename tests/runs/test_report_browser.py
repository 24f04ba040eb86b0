"""Reports in headless Chromium: no errors on the console, charts that are visible, switches that work."""

import json
import threading
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from helpers.browser import chromium, opened
from helpers.run_folders import eval_row, start_line, train_row, write_run
from vitpar.runs.folder import RunRecord
from vitpar.runs.live import serve
from vitpar.runs.page import report

LOOK = """<script>
const found = {};
const visible = selector => [...document.querySelectorAll(selector)].filter(one => one.getClientRects().length).length;
const press = id => document.getElementById(id).click();
found.charts = visible('figure.chart svg');
for (const axis of ['step', 'samples', 'hours']) {
  press('x-' + axis);
  found[axis] = visible('.ax:not(.ax-' + axis + ')');
  found[axis + ' drawn'] = visible('.ax-' + axis);
}
for (const name of ['off', 'light', 'strong']) {
  press('smooth-' + name);
  found[name] = [visible('.sm-light'), visible('.sm-strong')];
}
for (const theme of ['light', 'dark']) {
  press('theme-' + theme);
  found['theme ' + theme] = getComputedStyle(document.body).backgroundColor;
}
found.wider = document.documentElement.scrollWidth - document.documentElement.clientWidth;
found.width = window.innerWidth;
found.cut = [];
found.overlapping = [];
for (const svg of document.querySelectorAll('figure.chart svg')) {
  const all = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll('text')].filter(text => text.getClientRects().length);
  const boxes = texts.map(text => text.getBoundingClientRect());
  boxes.forEach((one, index) => {
    const words = texts[index].textContent;
    if (one.left < all.left - 1 || one.right > all.right + 1) found.cut.push(words);
    if (boxes.slice(index + 1).some(two => one.left < two.right - 1 && two.left < one.right - 1
      && one.top < two.bottom - 3 && two.top < one.bottom - 3)) found.overlapping.push(words);
  });
}
parent.postMessage(JSON.stringify(found), '*');
</script></body>"""
"""Script that presses all buttons, and reports to the page around it what can be seen."""
AROUND = """<script>addEventListener('message', event => { document.body.dataset.found = event.data; });</script>
<iframe src="looked.html" width="WIDTH" height="1000"></iframe>"""
"""Page around it, since the windows of a headless browser have a minimum width."""


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    chromium()
    return tmp_path_factory.mktemp("chromium")


def run_at(folder: Path, steps: int = 3000, mesh: str = "pp2xdp2") -> Path:
    rows = [train_row(step, mfu=0.123, loss_scale=65536.0, step_ms=1e5 + step) for step in range(1, steps + 1)]
    log = [start_line(mesh, steps), *(f"saving step {step}: x" for step in range(500, steps + 1, 500)), "done  x"]
    return write_run(
        folder, rows + [eval_row(step) for step in range(500, steps + 1, 500)], mesh=mesh, log=log, microbatches=4
    )


@pytest.mark.parametrize("width", [390, 1280])
def test_a_report_works_in_a_browser(width: int, profile: Path, tmp_path: Path) -> None:
    runs = [RunRecord(run_at(tmp_path / name)) for name in ("one", "another-run-with-a-long-name")]
    html = report(runs, made_by="vitpar")
    (tmp_path / "page.html").write_text(html)
    _, messages = opened(f"file://{tmp_path}/page.html", profile)
    assert messages == []
    without = html.replace('http-equiv="Content-Security-Policy"', 'name="none"').replace("</body>", LOOK)
    (tmp_path / "looked.html").write_text(without)
    (tmp_path / "around.html").write_text(f"<body>{AROUND.replace('WIDTH', str(width))}</body>")
    document, messages = opened(f"file://{tmp_path}/around.html", profile)
    assert messages == []
    found: dict[str, Any] = json.loads(unescape(document.partition('data-found="')[2].partition('"')[0]))
    charts = html.count("<figcaption>")
    assert found["charts"] == charts == 10
    for axis in ("step", "samples", "hours"):
        assert found[axis] == 0 and found[f"{axis} drawn"] == 2 * charts, "the numbers and the lines of one axis"
    assert found["off"] == [0, 0]
    assert found["light"][0] > 0 == found["light"][1] and found["strong"][1] > 0 == found["strong"][0]
    assert found["theme dark"] == "rgb(18, 20, 22)"
    assert found["width"] == width and (found["wider"], found["cut"], found["overlapping"]) == (0, [], [])


def test_a_page_of_a_stranger_cannot_run_scripts(profile: Path, tmp_path: Path) -> None:
    """If a text were not escaped, the content security policy would still stop its script."""
    html = report([RunRecord(run_at(tmp_path / "one", 600))])
    attack = "<script>document.body.dataset.stolen = 'yes'</script></body>"
    (tmp_path / "page.html").write_text(html.replace("</body>", attack))
    document, messages = opened(f"file://{tmp_path}/page.html", profile)
    assert 'data-stolen="yes"' not in document and any("Content Security Policy" in text for text in messages)


def test_a_live_page_reloads_itself(profile: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "mine", [train_row(1)])
    with serve([run], 0) as server:
        version = server.page()[1]
        stale = server.page()[0].replace(version.encode(), b"stale"), "stale"
        answers, real = [stale], server.page
        server.page = lambda: answers.pop() if answers else real()  # type: ignore[method-assign]
        thread = threading.Thread(target=server.run)
        thread.start()
        document, messages = opened(server.url, profile, milliseconds=8000)
        server.shutdown()
        thread.join()
    assert answers == [] and f'data-version="{version}"' in document
    assert [text for text in messages if "favicon" not in text] == []
