"""Pages of the planner in headless Chromium: values under the pointer, zoom, switches, themes, widths, inert markup."""

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from helpers.browser import CUT, DRAWN, Tab, shown
from helpers.planner_reports import CONFIG, ORIGIN, costs_of
from vitpar.planner.report.data import listed, origin_to_json, plan_of, search_record, title_of
from vitpar.planner.report.page import page, scaling_page
from vitpar.planner.search.best import Search
from vitpar.planner.search.space import Space

pytestmark = pytest.mark.slow
PLOTS = "[...document.querySelectorAll('.plot')]"
FIRST = "document.querySelector('.plot')"
OPEN = f"{PLOTS}.filter(plot => plot.querySelector('.main-svg'))"
OVERLAPS = f"""{OPEN}.flatMap(plot => ['.xtick text', '.ytick text'].flatMap(kind => {{
  const boxes = [...plot.querySelectorAll(kind)].map(text => text.getBoundingClientRect()).filter(box => box.width);
  return boxes.filter((one, at) => boxes.some((two, other) => other < at && one.left < two.right && two.left < one.right
    && one.top < two.bottom - 1 && two.top < one.bottom - 1)).map(() => plot.id);
}}))"""
HOSTILE = "<a href='https://x.invalid'>a</a><img src=x onerror='document.title=1'></script><script>alert(1)</script>"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    searching = Search(Space(CONFIG, 4, (64,), "bf16", roles=("pp",)), costs_of())
    return search_record(searching, searching.best(1e9), 1e9, ORIGIN, train="vitpar train --mesh plan.json")


def mark(tab: Tab, title: str) -> tuple[float, float]:
    """Return the place of the plan with a title in the first chart."""
    left, top, *_ = tab.box(FIRST)
    x, y = tab.run(
        f"(() => {{ const layout = {FIRST}._fullLayout; for (const one of {FIRST}.data) {{ "
        f"const at = (one.text ?? []).indexOf('{title}'); "
        "if (at >= 0) return [layout.xaxis.d2p(one.x[at]), layout.yaxis.d2p(one.y[at])]; } })()"
    )
    return left + x, top + y


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
def test_a_page_of_a_search_fits_and_is_drawn_when_it_is_opened(
    width: int, dark: bool, found: dict[str, Any], chrome: Browser, tmp_path: Path
) -> None:
    html = page(found, costs_of(), 2)
    assert len(html.encode()) < 6e6
    tab = shown(chrome, html, tmp_path, width=width, dark=dark)
    drawn = f"{OPEN}.length"
    before = tab.run(drawn)
    for _ in range(2):
        assert tab.run("document.documentElement.scrollWidth <= innerWidth") and tab.run("innerWidth") == width
        assert tab.run(CUT) == [] and tab.run(OVERLAPS) == []
        colour = "rgb(255, 255, 255)" if dark else "rgb(0, 0, 0)"
        assert tab.run(f"getComputedStyle({FIRST}.querySelector('.xtick text')).fill") == colour
        dark = not dark
        tab.press("theme-dark" if dark else "theme-light")
    tab.run(f"delete {DRAWN}; document.querySelectorAll('details:has(.plot)')[1].open = true")
    tab.wait(f"{DRAWN} && {drawn} === {before + 3}")
    assert tab.run(CUT) == [] and tab.complaints == []


def test_the_pointer_shows_a_plan_and_buttons_hide_families(
    found: dict[str, Any], chrome: Browser, tmp_path: Path
) -> None:
    tab = shown(chrome, page(found, costs_of(), 2), tmp_path)
    best = found["plans"][0]
    place = mark(tab, title_of(best))
    words = " ".join(tab.hovered(*place))
    for said in (title_of(best), f"{best['images_per_second']:,.1f} samples/s", "on the fullest rank"):
        assert said in words, said
    assert re.search(r"± \d+ %: [\d,]+ to [\d,]+", words)
    assert "budget 1 GB" in tab.run(f"{FIRST}.textContent")
    bars = f"{FIRST}.querySelectorAll('.yerror').length"
    marks = f"{FIRST}.querySelectorAll('.point').length"
    assert tab.run(bars) == tab.run(marks) == len(listed(found))
    tab.press("chart-Samples/s by memory-0/pipeline")
    pipelines = sum(plan_of(one).pipeline_degree > 1 for one in listed(found))
    assert tab.run(marks) == len(listed(found)) - pipelines > 0 and pipelines
    tab.press("chart-Samples/s by memory-0/bands")
    assert tab.run(bars) == 0 and tab.complaints == []


def test_scaling_shows_plans_under_the_pointer(found: dict[str, Any], chrome: Browser, tmp_path: Path) -> None:
    best = found["plans"][0] | {"efficiency": 1.0, "at_most_better_by": 0.0}
    none = {"ranks": 4, "batch_size": 64, "efficiency": None}
    points = [none if ranks == 4 else best | {"ranks": ranks} for ranks in (1, 4, 8)]
    about = origin_to_json({"vitpar": HOSTILE, "command": HOSTILE}, costs_of())
    html = scaling_page(HOSTILE, {**about, "weak": points, "strong": points})
    tab = shown(chrome, html, tmp_path, width=390)
    assert tab.run(CUT) == [] and tab.run(OVERLAPS) == []
    left, top, width, height = tab.box(FIRST)
    words = " ".join(tab.hovered(left + 0.99 * width, top + 0.5 * height))
    assert "weak" in words and title_of(best) in words
    assert tab.complaints == []
    assert not tab.run("document.querySelector('img, a, iframe')") and tab.run("document.title") != "1"


def test_markup_of_profiles_and_names_stays_inert(found: dict[str, Any], chrome: Browser, tmp_path: Path) -> None:
    why = {"strategy": HOSTILE, "why": HOSTILE}
    hostile = found | dict.fromkeys(("vitpar", "command", "hardware", "device", "train"), HOSTILE)
    hostile |= {"notes": [HOSTILE], "why_not": [*found["why_not"], why]}
    tab = shown(chrome, page(hostile, costs_of(), 2), tmp_path)
    assert not tab.run("document.querySelector('img, a, iframe')") and tab.run("document.title") != "1"
    assert tab.run("document.scripts.length") == 4, "data, library packed and unpacked, and the page's script"
    assert tab.run("performance.getEntriesByType('resource').length") == 0 and tab.complaints == []
