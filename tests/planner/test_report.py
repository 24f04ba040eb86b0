"""Reports of a prediction: uncertainty, timeline, layer map and rank placement."""

import itertools
import json
import re
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

from helpers.html_pages import Page, charts_of
from helpers.planner_reports import CONFIG, ORIGIN, costs_of
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import Price, price
from vitpar.planner.profile.curves import Curve
from vitpar.planner.profile.profiles import LayerProfile
from vitpar.planner.report import data
from vitpar.planner.report.page import page
from vitpar.planner.report.timeline import SENDS, messages, timeline
from vitpar.planner.report.uncertainty import BANDS, VITPAR, band_source, uncertainty
from vitpar.planner.search.best import Search
from vitpar.planner.search.space import Space
from vitpar.runs.pages.maps import rank_grid
from vitpar.strategy import parse, validate


def priced(words: str, costs: LayerCosts, batch_size: int = 768, **fields: Any) -> Price:
    return price(validate(replace(parse(words), **fields), CONFIG, batch_size), costs, batch_size)


def spread(curve: Curve, share: float) -> Curve:
    timings = tuple(timing.model_copy(update={"spread": share}) for timing in curve.timings)
    return curve.model_copy(update={"timings": timings})


def noisy(layer: LayerProfile) -> LayerProfile:
    return layer.model_copy(update={"forward": spread(layer.forward, 0.1), "backward": spread(layer.backward, 0.2)})


def test_profile_spread_propagates_to_the_step() -> None:
    """Forward has a spread of 10 %, backward of 20 %; communication and the optimizer are exact."""
    plain = costs_of()
    costs = LayerCosts(
        CONFIG,
        plain.hardware,
        plain.model.model_copy(update={"layers": tuple(map(noisy, plain.model.layers)), "measured": {}}),
    )
    step = priced("dp8", costs)
    parts = {part: seconds for part, seconds in step.time.items() if part not in ("other", "waiting", "uneven")}
    expected = (0.1 * parts["forward"] + 0.2 * parts["backward"]) / sum(parts.values())
    found = uncertainty(step, costs)
    assert found is not None and found["share"] == pytest.approx(expected) and found["of"] == "timings"
    links = tuple(spread(link, 1.0) for link in plain.hardware.links)
    slow = LayerCosts(CONFIG, plain.hardware.model_copy(update={"links": links}), costs.model)
    sends, quiet = (uncertainty(priced("tp2xdp4", each), each) for each in (slow, costs))
    assert sends is not None and quiet is not None and sends["share"] > 1.2 * quiet["share"]


def test_estimates_carry_the_band_of_their_runs() -> None:
    costs = costs_of()
    record = data.plan_record(priced("dp8", costs), costs)
    found, band = record["uncertainty"], BANDS[False, True]
    assert (found["share"], found["runs"]) == (band.share, band.runs)
    assert found["source"].startswith(f"± {100 * band.share:.0f} %: ")
    assert f"{band.runs} {band.description}" in found["source"] and "none is of vitpar" in found["source"]
    assert "error of estimates" in data.noise_words(record)
    assert "none is from more than one GPU" in band_source(VITPAR)
    bare = costs_of(measured={})
    assert uncertainty(priced("dp8", bare), bare) is None, "no spread is not a spread of nothing"


def test_plans_within_the_uncertainty_are_marked() -> None:
    costs = costs_of()
    best, close, far = (data.plan_record(priced(words, costs), costs) for words in ("dp8", "dp8+zero1", "tp2xdp4"))
    apart = abs(close["images_per_second"] / best["images_per_second"] - 1)
    doubtful = best | {"uncertainty": {"share": apart * 1.01}}
    marked = [" ".join(data.figures(one, doubtful)) for one in (best, close, far)]
    assert ["≈" in words for words in marked] == [False, True, False]
    assert "≈" not in " ".join(data.figures(close, best | {"uncertainty": {"share": apart * 0.99}}))


@pytest.mark.parametrize(
    ("words", "microbatches", "sent"),
    [
        ("dp8", 2, {"gradients"}),
        ("fsdp8", 6, {"gather", "gradients"}),
        ("tp2xdp4", 1, {"tensor", "gradients"}),
        ("pp1: 0-5=dp8, *=tp2xdp4", 1, {"tensor", "gradients", "redistribution"}),
    ],
)
def test_timeline_without_a_pipeline_shows_the_communication(words: str, microbatches: int, sent: set[str]) -> None:
    costs = costs_of()
    step = priced(words, costs, microbatches=microbatches)
    spans = timeline(step, costs)
    assert {span.what for span in spans if span.row == SENDS} == sent
    seconds: defaultdict[str, float] = defaultdict(float)
    for span in spans:
        seconds[span.what] += span.end - span.start
        assert 0 <= span.start < span.end <= step.seconds * (1 + 1e-9)
    assert max(span.end for span in spans) == pytest.approx(step.seconds)
    for part in ("forward", "backward", "tensor", "optimizer", "redistribution"):
        assert seconds[part] == pytest.approx(step.time.get(part, 0.0), abs=1e-9), part
    for part in ("gather", "gradients"):  # these overlap with computing, so they last longer than ranks wait for them
        assert seconds[part] >= step.time.get(part, 0.0) - 1e-9, part
    for row in {span.row for span in spans}:
        mine = [span for span in spans if span.row == row]
        assert all(one.end <= two.start + 1e-9 for one, two in itertools.pairwise(mine)), f"{row} overlaps"


def text_of(html: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


def test_rank_grid_places_every_rank() -> None:
    words = text_of(rank_grid(validate(parse("pp2xdp2xtp2"), CONFIG, 64)))
    assert words == (
        "pp 0 0 dp 0 tp 0 1 dp 0 tp 1 2 dp 1 tp 0 3 dp 1 tp 1 pp 1 4 dp 0 tp 0 5 dp 0 tp 1 6 dp 1 tp 0 7 dp 1 tp 1"
    )
    mixed = text_of(rank_grid(validate(parse("pp1: 0=tp2xdp4, *=dp8"), CONFIG, 64)))
    assert mixed.startswith("Layers under tp2xdp4 0 tp 0 dp 0") and "Layers under dp8 0 dp 0" in mixed
    large = text_of(rank_grid(validate(parse("dp64xtp2"), CONFIG, 128)))
    assert large.startswith("dp: 0, 2, 4 … 126 | 1, 3, 5 … 127; tp: 0 and 1 | 2 and 3 |")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    costs = costs_of()
    searching = Search(Space(CONFIG, 8, (256,), "bf16", roles=("pp", "dp", "tp")), costs)
    result = searching.best(20e9)
    return data.search_record(searching, result, 20e9, ORIGIN, train="vitpar train --mesh plan.json")


def test_report_page_names_the_source_of_its_figures(found: dict[str, Any]) -> None:
    html = page(found, costs_of(), 2)
    words = Page(html).text
    for said in (
        *("vitpar 1.2.3", ORIGIN["command"], "bf16", "batch 256", "MFU", f"{BANDS[False, True].runs} published runs"),
        "vitpar train --mesh plan.json",
    ):
        assert said in words, said
    assert not re.search(r"\de[+-]\d", words), "figures without exponents"
    drawn = charts_of(html)
    plans = html.count("<summary>") - html.count("<summary>Key points")
    assert len(drawn) == 2 + 3 * plans and html.count('role="img" aria-label="') == len(drawn)
    (json_words,) = [json.dumps(found)]
    for key in ("vitpar", "command", "precision", "mfu", "uncertainty", "train"):
        assert f'"{key}"' in json_words


def test_the_chart_has_every_plan_of_the_table(found: dict[str, Any]) -> None:
    """Without searches for less memory, the plans of the table are drawn nevertheless."""
    searching = Search(Space(CONFIG, 4, (256,), "bf16", flags=("ckpt",)), costs_of())
    result = searching.best(20e9)
    short = data.search_record(searching, result, 20e9, ORIGIN, frontier=False)
    small = short | {"memory_budget_bytes": 5e9}
    for one in (found, short, small, short | {"frontier": short["frontier"][:1]}):
        html, plans = page(one, costs_of(), 2), data.listed(one)
        _, *families = charts_of(html)["Samples/s by memory"]["traces"]
        marks = [mark for family in families for mark in zip(*(family[k] for k in ("text", "x", "y")), strict=True)]
        expected = [(data.title_of(p), p["memory_bytes"], p["images_per_second"]) for p in plans]
        assert len(marks) == len(expected) > 5
        for mark, plan in zip(sorted(marks), sorted(expected), strict=True):
            assert mark == (plan[0], pytest.approx(plan[1] / 1e9), pytest.approx(plan[2])), plan
        bands = [size for family in families for size in family["error_y"]["array"]]
        assert sum(bands) == pytest.approx(BANDS[False, True].share * sum(y for *_, y in marks))
        hollow = sum("-open" in symbol for family in families for symbol in family["marker"]["symbol"])
        assert hollow == sum(p["memory_bytes"] > one["memory_budget_bytes"] for p in plans)
        assert text_of(html.partition("<h2>Plans</h2>")[2]).count("samples/s") >= 1 and "No plan" not in html
    plans = [data.plan_of(one) for one in short["frontier"]]
    assert all(searching.space.covers(plan) for plan in plans if plan.is_uniform)


def test_messages_leave_after_an_action_and_arrive_before_the_next() -> None:
    step = priced("pp4xdp2", costs_of(), microbatches=8, schedule="1f1b")
    sent = messages(step)
    assert len(sent) == 2 * 3 * 8, "an output and a gradient of each micro-batch between neighbouring stages"
    ends = {(f"pp {event.pp}", event.end) for event in step.events}
    starts = defaultdict(list)
    for event in step.events:
        starts[f"pp {event.pp}", event.microbatch].append(event.start)
    for message in sent:
        assert (message.source, message.sent) in ends and message.sent < message.arrived
        number = int(message.words.rpartition(" ")[2])
        assert any(start >= message.arrived for start in starts[message.target, number])
    assert messages(priced("dp8", costs_of())) == ()
