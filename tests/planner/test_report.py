"""Reports of a prediction: uncertainty, timeline, layer map, rank placement and colours."""

import itertools
import json
import re
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

from helpers.colours import KINDS, closest
from vitpar.models import model_config
from vitpar.pages import svg
from vitpar.pages.maps import layer_map, rank_grid
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.memory import PARTS
from vitpar.planner.cost.price import Price, price
from vitpar.planner.profile.bands import BANDS, VITPAR
from vitpar.planner.profile.cluster import find_cluster
from vitpar.planner.profile.curves import Curve
from vitpar.planner.profile.estimate import estimate_model, tensors
from vitpar.planner.profile.profiles import LayerProfile
from vitpar.planner.report.data import Findings, Provenance, duration, figures, findings, noise_words, trace
from vitpar.planner.report.page import page
from vitpar.planner.report.timeline import SENDS, timeline
from vitpar.planner.report.uncertainty import Uncertainty, uncertainty
from vitpar.planner.search.best import Search
from vitpar.planner.search.space import Space
from vitpar.strategy import parse, validate
from vitpar.text import size

CONFIG = model_config("vit_small_patch16_224")
ORIGIN = Provenance("1.2.3", "vitpar search --cluster 8xH100")


def costs_of(**changed: Any) -> LayerCosts:
    hardware = find_cluster("8xH100").hardware()
    model = estimate_model(CONFIG, "bf16", hardware, tensors(CONFIG, 8))
    return LayerCosts(CONFIG, hardware, model.model_copy(update=changed))


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
    assert found is not None and found.share == pytest.approx(expected) and found.band is None
    links = tuple(spread(link, 0.5) for link in plain.hardware.links)
    slow = LayerCosts(CONFIG, plain.hardware.model_copy(update={"links": links}), costs.model)
    sends, quiet = (uncertainty(priced("tp2xdp4", each), each) for each in (slow, costs))
    assert sends is not None and quiet is not None and sends.share > 1.2 * quiet.share


def test_estimates_carry_the_band_of_their_runs() -> None:
    costs = costs_of()
    found = uncertainty(priced("dp8", costs), costs)
    band = BANDS[False, True]
    assert found == Uncertainty(band.share, band) and str(found) == f"± {100 * band.share:.0f} %"
    assert f"{band.runs} {band.description}" in found.source and "none is of vitpar" in found.source
    assert found.to_json()["runs"] == band.runs and "error of estimates" in noise_words(found)
    assert "none is from more than one GPU" in Uncertainty(VITPAR.share, VITPAR).source
    bare = costs_of(measured={})
    assert uncertainty(priced("dp8", bare), bare) is None, "no spread is not a spread of nothing"


def test_plans_within_the_uncertainty_are_marked() -> None:
    costs = costs_of()
    best, close, far = (priced(words, costs) for words in ("dp8", "dp8+zero1", "tp2xdp4"))
    apart = abs(close.images_per_second / best.images_per_second - 1)
    doubt = Uncertainty(apart * 1.01)
    marked = [" ".join(figures(one, best, doubt)) for one in (best, close, far)]
    assert ["≈" in words for words in marked] == [False, True, False]
    assert "≈" not in " ".join(figures(close, best, Uncertainty(apart * 0.99)))


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


def test_trace_names_its_plan_and_rows() -> None:
    costs = costs_of()
    found = trace(priced("pp2xdp4", costs, microbatches=4), costs, ORIGIN)
    events: Any = found["traceEvents"]
    about: Any = found["otherData"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["pp 0", "pp 1"]
    assert about["plan"] == "pp2xdp4 1f1b, 4 micro-batches" and about["command"] == ORIGIN.command
    assert (about["batch_size"], about["precision"], about["vitpar"]) == (768, "bf16", "1.2.3")


def test_durations_have_few_digits_and_one_unit() -> None:
    assert [duration(s) for s in (1.36, 1360.0, 0.2627, 45e-6)] == ["1.36 s", "1,360.00 s", "262.7 ms", "45.0 µs"]


def test_sizes_have_no_exponents() -> None:
    assert [size(n) for n in (1.36e12, 999.7e6, 640e6, 0.12e6)] == ["1,360 GB", "1 GB", "640 MB", "0.12 MB"]


def text_of(html: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


def test_layer_map_has_every_layer_once() -> None:
    plan = validate(parse("pp2: 0-3=dp4, *=tp2xdp2+ckpt"), CONFIG, 64)
    words = text_of(layer_map(CONFIG, plan))
    assert "0 0-3 embed tp2xdp2+ckpt 0 0-3 blocks 0-3 dp4 0 0-3 blocks 4-5 tp2xdp2+ckpt" in words
    assert words.endswith("1 4-7 blocks 6-11, head tp2xdp2+ckpt")


def test_rank_grid_places_every_rank() -> None:
    words = text_of(rank_grid(validate(parse("pp2xdp2xtp2"), CONFIG, 64)))
    assert words == (
        "pp 0 0 dp 0 tp 0 1 dp 0 tp 1 2 dp 1 tp 0 3 dp 1 tp 1 pp 1 4 dp 0 tp 0 5 dp 0 tp 1 6 dp 1 tp 0 7 dp 1 tp 1"
    )
    alike = text_of(rank_grid(validate(parse("pp1: 0=dp8+ckpt, *=dp8"), CONFIG, 64)))
    assert alike.count("dp 7") == 1, "one grid for strategies that place ranks alike"
    mixed = text_of(rank_grid(validate(parse("pp1: 0=tp2xdp4, *=dp8"), CONFIG, 64)))
    assert mixed.startswith("Layers under tp2xdp4 0 tp 0 dp 0") and "Layers under dp8 0 dp 0" in mixed
    large = text_of(rank_grid(validate(parse("dp64xtp2"), CONFIG, 128)))
    assert large.startswith("dp: 0, 2, 4 … 126 | 1, 3, 5 … 127; tp: 0 and 1 | 2 and 3 |")


@pytest.fixture(scope="module")
def found() -> Findings:
    costs = costs_of()
    searching = Search(Space(CONFIG, 8, (256,), "bf16", roles=("pp", "dp", "tp")), costs)
    result = searching.best(20e9)
    return findings(searching, result, 20e9, ORIGIN, "vitpar train --mesh plan.json")


def test_report_page_names_the_source_of_its_figures(found: Findings) -> None:
    html = page(found, 2)
    words = text_of(html)
    for said in (
        "vitpar 1.2.3",
        ORIGIN.command,
        "bf16",
        "batch 256",
        "MFU",
        f"{BANDS[False, True].runs} published runs",
        "Layers and ranks",
        "Ranks on each axis",
        "vitpar train --mesh plan.json",
        "blocks 0-11",
    ):
        assert said in words, said
    assert not re.search(r"\de[+-]\d", words), "figures without exponents"
    charts = html.count("<svg")
    assert charts > 3 and html.count('role="img" aria-label="') == charts
    assert re.search(r">0 ms<.*>\d+ ms<", html), "the timeline has an axis of time"
    (json_words,) = [json.dumps(found.to_json())]
    for key in ("vitpar", "command", "precision", "mfu", "uncertainty", "train"):
        assert f'"{key}"' in json_words


def test_reasons_within_the_uncertainty_are_marked(found: Findings) -> None:
    (reason, *_) = [r for r in found.reasons if r.price and r.price.memory_bytes <= found.budget and "fewer" in r.why]
    best = found.result.plans[0].images_per_second
    assert reason.price is not None
    apart = 1 - reason.price.images_per_second / best
    assert found.why(reason).endswith("≈") == (apart < BANDS[False, True].share)
    assert not replace(found, budget=1.0).why(reason).endswith("≈"), "what does not fit is not nearly as good"


def test_frontier_has_a_plan_with_less_memory_if_the_table_has_one() -> None:
    searching = Search(Space(CONFIG, 4, (256,), "bf16", flags=("ckpt",)), costs_of())
    result = searching.best(20e9)
    searching.frontier(result.plans[0], until=0.0)  # the time of the search is over
    found = findings(searching, result, 20e9, ORIGIN)
    assert min(price.memory_bytes for price in found.result.plans) < found.result.plans[0].memory_bytes
    assert len(found.frontier) > 1 and "No plan with less memory than" not in page(found, 2)
    assert all(searching.space.covers(price.plan) for price in found.frontier if price.plan.is_uniform)


def test_frontier_of_one_plan_is_text_instead_of_a_chart(found: Findings) -> None:
    lone = replace(found, frontier=found.frontier[:1])
    assert "No plan with less memory than" in page(lone, 2)
    assert page(lone, 2).count("<svg") == page(replace(found, frontier=found.frontier[:1] * 2), 2).count("<svg") - 1


TIME = tuple(name for name in svg.COLOURS if name not in PARTS and not name.endswith(" gradients"))
TIME += ("gradients", "optimizer", "teacher")
SHARED = {frozenset(("gather", "gathered")), frozenset(("backward", "input gradients"))}
"""Pairs of names with the same meaning, which share a colour."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", [TIME, PARTS], ids=["time", "memory"])
def test_chart_colours_are_distinguishable_for_colour_blind_readers(names: tuple[str, ...], kind: str) -> None:
    apart, *pair = closest({svg.COLOURS[name] for name in names}, kind)
    assert apart > 15, f"{pair} look alike ({apart:.0f})"


def test_each_colour_has_one_meaning() -> None:
    meanings: defaultdict[str, set[str]] = defaultdict(set)
    for name, colour in svg.COLOURS.items():
        meanings[colour].add(name)
    shared = {frozenset(names) for names in meanings.values() if len(names) > 1}
    assert shared == SHARED
    assert set(priced("dp8", costs_of()).time) <= set(svg.COLOURS) and set(PARTS) <= set(svg.COLOURS)
