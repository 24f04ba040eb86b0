"""Charts: axes, lines that coincide, marks, colours, words."""

import re

import numpy as np
import pytest

from helpers.colours import KINDS, closest
from vitpar.pages import svg
from vitpar.runs.axes import HEIGHT, LEFT, TOP, VerticalAxis, compact, round_ticks
from vitpar.runs.chart import AXES, COLOURS, Line, LineChart, RunMark, draw


def line(run: int, y: list[float], *, dashed: bool = False, first: int = 1) -> Line:
    steps = np.arange(first, first + len(y), dtype=np.float64)
    x = {"step": steps, "samples": 128 * steps, "hours": steps / 3600}
    return Line(run, f"run {run + 1}", x, np.array(y, dtype=np.float64), dashed)


def chart(*lines: Line, **more: object) -> str:
    return draw(LineChart("Loss", lines, "{:.2f}".format, compact, **more))  # type: ignore[arg-type]


def test_ticks_are_round_and_few_and_numbers_short() -> None:
    assert round_ticks(0, 450) == [0, 100, 200, 300, 400]
    assert round_ticks(1.31, 2.38) == pytest.approx([1.4, 1.6, 1.8, 2.0, 2.2])
    for low, high in ((0, 1), (3, 3.001), (-7, 12), (0, 1e30), (1e-9, 2e-9)):
        assert 2 <= len(round_ticks(low, high)) <= 6
    values = {0.0: "0", 0.25: "0.25", 1500: "1,500", 20_000: "20 k", 65_536: "65.54 k", 1.5e6: "1.5 M", 2e9: "2 G"}
    assert {value: compact(value) for value in values} == values


def test_axes_are_logarithmic_for_a_large_range_and_hold_every_value() -> None:
    values = np.geomspace(0.1, 1000, 50)
    axis = VerticalAxis(values, compact, zero=False, log=True)
    places = axis.at(np.array([0.1, 10.0, 1000.0]))
    assert "logarithmic" in axis.drawn and places[1] == pytest.approx((places[0] + places[2]) / 2)
    for given in (values - 1, np.linspace(1, 2, 50)):
        assert "logarithmic" not in VerticalAxis(given, compact, zero=False, log=True).drawn
    assert "logarithmic" not in VerticalAxis(values, compact, zero=False, log=False).drawn
    for odd in ([0.0], [0.0, 0.0], [5.0], [-3.0, -3.0], [1e30, -1e30], [1e-30]):
        for zero in (False, True):
            at = VerticalAxis(np.array(odd), compact, zero=zero, log=True).at(np.array(odd))
            assert np.isfinite(at).all() and (at >= 0).all() and (at <= HEIGHT).all(), odd
    shares = VerticalAxis(np.array([0.5, 1.0]), compact, zero=True, log=False, share=True)
    assert shares.at(np.array([1.0]))[0] == pytest.approx(TOP), "shares end at 100 %"


def test_huge_steps_are_drawn() -> None:
    for steps in (1, 2):
        assert "nan" not in chart(line(0, [1.0] * steps, first=2**53 - 1))
        assert "nan" not in chart(line(0, [1.0] * steps, first=10**30))


def test_lines_that_coincide_are_drawn_in_turns() -> None:
    y = [3.0, 2.0, 1.0]
    html = chart(line(0, y), line(1, [v + 0.001 for v in y]), smooth=False)
    assert re.findall(r'class="smooth (c\d)" style="stroke-dasharray:7 7;stroke-dashoffset:(-?\d+)', html) == [
        ("c0", "0"),
        ("c1", "-7"),
    ]
    assert "The lines of the runs coincide: they differ by at most 0.001." in html
    assert "The lines of the runs are equal." in chart(line(0, y), line(1, y))
    others = {"apart": line(1, [3.0, 2.5, 1.0]), "shorter": line(1, y[:2]), "gap": line(1, [3.0, np.nan, 1.0])}
    for name, other in {**others, "other steps": line(1, y, first=9)}.items():
        html = chart(line(0, y), other)
        assert "stroke-dasharray" not in html and "coincide" not in html, name
    assert "coincide" not in chart(line(0, y))
    late = chart(line(0, y, first=1001), smooth=False)
    assert f'<path d="M{LEFT} ' in late, "a run that starts late fills the chart"


def test_validation_has_dots_and_training_is_smoothed() -> None:
    html = chart(line(0, [3.0, 2.0, 2.5, 1.0]), line(0, [2.0, 1.5], dashed=True))
    drawings = len(re.findall(r'<g class="ax [^>]*><path', html))
    assert (
        drawings
        and html.count('class="raw c0"') == html.count('class="val c0"') == html.count('class="dots c0"') == drawings
    )
    assert html.count("sm-light") == html.count("sm-strong") == drawings


def test_axes_on_which_lines_are_the_same_share_a_drawing() -> None:
    html = chart(line(0, [3.0, 2.0]))
    numbers, lines = (re.findall(rf'<g class="ax ([^>]*)"><{tag}', html) for tag in ("line", "path"))
    assert numbers == [f"ax-{axis}" for axis in AXES] and lines == [" ".join(numbers)]
    uneven = line(0, [3.0, 2.0, 1.0])
    uneven.x["hours"][1] = 2.9 / 3600  # type: ignore[index]
    assert re.findall(r'<g class="ax ([^>]*)"><path', chart(uneven)) == ["ax-step ax-samples", "ax-hours"]


def test_marks_that_cannot_be_told_apart_are_left_out() -> None:
    marks = [
        RunMark(0, "saved", {"step": step, "samples": np.nan, "hours": step / 3600}, f"checkpoint after step {step}")
        for step in range(1, 1001)
    ]
    marks += [RunMark(0, "restart", dict.fromkeys(AXES, 500.0), "resumed")] * 2
    html = chart(line(0, [1.0] * 1000), marks=marks)
    (step, samples, _) = re.findall('<g class="ax [^>]*>((?:<path|<g).*?)(?=<g class="ax|</svg>)', html)
    assert 40 <= step.count("checkpoint after") <= 60 and step.count("resumed") == 1
    assert samples.count("checkpoint after") == 0, "where they were is not known"


def test_the_description_names_the_key_points() -> None:
    html = chart(line(0, [3.0, np.nan, 1.0, 2.0]), line(1, [np.nan] * 4))
    assert "run 1: from 3.00 at step 1 to 2.00 at step 4; lowest 1.00 at step 3, highest 3.00 at step 1." in html
    assert "run 2: no finite value." in html
    assert "<td>1.00 <small>at 3</small></td>" in html


def test_colours_of_runs_are_distinguishable_for_colour_blind_readers() -> None:
    for kind in KINDS:
        for theme in (0, 1):  # light and dark
            apart, *pair = closest([pair[theme] for pair in COLOURS], kind)
            assert apart > 15, f"{kind}: {pair} look alike ({apart:.0f})"


def contrast(one: str, two: str) -> float:
    """Return the contrast of two colours by the Web Content Accessibility Guidelines 2.1."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    light, dark = sorted((luminance(one), luminance(two)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_lines_contrast_with_the_page_and_mean_nothing_else() -> None:
    """Graphics need a contrast of 3 (guideline 1.4.11)."""
    for light, dark in COLOURS:
        assert contrast(light, "#ffffff") > 3 and contrast(dark, "#121416") > 3
    assert not {colour for pair in COLOURS for colour in pair} & set(svg.COLOURS.values())
