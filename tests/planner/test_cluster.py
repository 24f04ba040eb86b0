"""Clusters from data sheets: names, files, the time that links take, and steps that take as long as their messages."""

from dataclasses import replace
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import calibration
from helpers.paths import ROOT
from vitpar.errors import PlannerError
from vitpar.models import model_config
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.links import Links, RankGroup
from vitpar.planner.cost.price import price
from vitpar.planner.profile.cluster import Cluster, Network, Wire, find_cluster
from vitpar.planner.profile.estimate import estimate_model, tensors
from vitpar.planner.report.uncertainty import BANDS, OTHERS, VITPAR, Band, uncertainty
from vitpar.recipe.request import RecipeRequest
from vitpar.strategy import parse, validate
from vitpar.training.metrics import peak_flops
from vitpar_cli.profiled import MachineOptions, planned_recipe

SHIPPED = sorted(file.name.removesuffix(".toml") for file in (files("vitpar") / "clusters").iterdir())
MODELS = ("vit_small_patch16_224", "vit_base_patch16_224", "vit_giant_patch14_224")


def test_cluster_names_give_nodes_and_devices() -> None:
    one, many = find_cluster("8xH100"), find_cluster("32x8xh200")
    assert (one.nodes, one.devices_per_node, many.nodes, many.devices_per_node) == (1, 8, 32, 8)
    assert many.hardware().ranks == 256 and many.hardware(64).ranks == 64
    assert find_cluster("4x8xa100").device_name == find_cluster("2xA100-80GB").device_name == "NVIDIA A100-SXM4-80GB"
    assert find_cluster("4x8xA100-40GB").hardware().memory_bytes == 40 * 2**30


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_clusters_have_sources_and_cost_overlap(name: str) -> None:
    cluster = find_cluster(f"2x8x{name}")
    assert len(cluster.sources) > 3 and cluster.host and cluster.inter
    assert cluster.overlap and min(cluster.overlap.compute, cluster.overlap.communication) > 1
    assert cluster.hardware().peaks["bfloat16"] == cluster.matmul["bfloat16"] > cluster.matmul["float32"]


def test_training_takes_peak_flops_from_the_data_sheets(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(("NVIDIA H100 80GB HBM3",) * 3 + ("NVIDIA L4",))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: next(names))
    device = torch.device("cuda")
    assert [peak_flops(device, name) for name in ("bf16", "fp8", "fp32", "bf16")] == [989.4e12, 989.4e12, 66.9e12, None]
    assert peak_flops(torch.device("cpu"), "bf16") is None


def test_cluster_is_read_from_a_file(tmp_path: Path) -> None:
    for name, sentence in (
        ("8xH10", r"unknown cluster '8xH10' \(did you mean 'H100'\?\): use a TOML file"),
        ("0xH100", "has no devices"),
        ("none.toml", "cannot read the cluster none.toml: No such file"),
    ):
        with pytest.raises(PlannerError, match=sentence):
            find_cluster(name)
    path = tmp_path / "mine.toml"
    text = """
nodes = 2
devices_per_node = 4
device_name = "mine"
memory_bytes = 16_000_000_000
memory_bandwidth = 1e12
sustained = 0.5
matmul = { bfloat16 = 1e14 }
intra = { bandwidth = 1e11, latency = 1e-5 }
"""
    path.write_text(text)
    cluster = find_cluster(str(path))
    assert cluster.name == "mine" and cluster.hardware(4).ranks == 4
    with pytest.raises(PlannerError, match="has several nodes but no inter"):
        cluster.hardware()
    with pytest.raises(PlannerError, match="9 ranks do not fit the 8 devices"):
        cluster.hardware(9)


def test_links_between_nodes_are_slower_and_shared() -> None:
    links = Links(find_cluster("4x8xH100").hardware())
    size = 10**9
    groups = (RankGroup(8, 1, 1), RankGroup(16, 1, 2, 8))
    within, across = (links.seconds("all_reduce", group, size) for group in groups)
    assert within < across < 2 * within  # all 8 links of a node work in parallel
    strided = links.seconds("all_reduce", RankGroup(4, 8, 4, 1, 1 / 8), size)
    assert strided > 4 * links.seconds("all_reduce", RankGroup(4, 1, 1), size)  # one rank per node uses only one link
    for operation in ("all_gather", "reduce_scatter", "all_to_all"):
        assert links.seconds(operation, RankGroup(8, 1, 1), size) < within


@pytest.mark.parametrize(
    ("nics", "alone", "joined"), [(None, 1, 4), (8, 1, 4), (16, 2, 8), (2, 1 / 4, 1), (1, 1 / 8, 1 / 2)]
)
def test_devices_share_the_network_cards_of_their_node(nics: int | None, alone: float, joined: float) -> None:
    """A pair has `alone` cards if all 8 devices of a node send, and a group with 4 members on each node `joined`."""
    cluster = find_cluster("2x8xRTX4090")
    inter = Network(bandwidth=10**9, latency=0, nics_per_node=nics)
    shared = cluster.model_copy(update={"inter": inter, "sustained_bandwidth": 1.0})
    links, size = Links(shared.hardware()), 10**9
    assert links.seconds("p2p", RankGroup(2, 8, 2, 1, 1 / 8), size) == pytest.approx(1 / alone)
    assert links.seconds("all_reduce", RankGroup(2, 8, 2, 1, 1 / 8), size) == pytest.approx(1 / alone)
    assert links.seconds("all_gather", RankGroup(8, 2, 2, 4, 1 / 2), size) == pytest.approx(7 / 8 / joined)
    # Each of the 4 members sends half of its bytes to the other node.
    assert links.seconds("all_to_all", RankGroup(8, 2, 2, 4, 1 / 2), size) == pytest.approx(4 / 2 / joined)
    # A pair that sends while the other ranks of its node do not has a card for itself, at most.
    assert links.seconds("p2p", RankGroup(2, 8, 2, 1, 1), size) == pytest.approx(1 / max(1, alone))


def test_odd_numbers_of_devices_send_between_stages() -> None:
    """Equal pairs do not partition them, so messages of pairs follow from those of other groups."""
    cluster = find_cluster("5x7xA100")
    links, even = Links(cluster.hardware()), Links(find_cluster("2x4xA100").hardware())
    for pair in (RankGroup(2, 1, 1), RankGroup(2, cluster.devices_per_node, 2)):
        assert links.seconds("p2p", pair, 10**8) == pytest.approx(even.seconds("p2p", pair, 10**8), rel=0.02)


def mfu(cluster: str, model: str, precision: str = "bf16", compiled: bool = True, batch: int = 64) -> float:
    config, hardware = model_config(model), find_cluster(cluster).hardware()
    costs = LayerCosts(config, hardware, estimate_model(config, precision, hardware, ("tp1",), compiled=compiled))
    found = price(validate(parse(f"dp{hardware.ranks}"), config, batch * hardware.ranks), costs, batch * hardware.ranks)
    used = found.mfu(costs)
    assert used is not None
    return used


@pytest.mark.parametrize("name", SHIPPED)
def test_utilisation_stays_below_the_roofline(name: str) -> None:
    most = find_cluster(f"1x{name}").sustained
    for model, nodes in product(MODELS, (1, 2)):
        eager, compiled = (mfu(f"{nodes}x2x{name}", model, compiled=way, batch=1024) for way in (False, True))
        assert 0.1 < eager < compiled < most, model


def test_fp8_helps_wide_compiled_blocks_only() -> None:
    bf16, fp8 = (mfu("1xH200", MODELS[2], precision) for precision in ("bf16", "fp8"))
    assert fp8 / bf16 == pytest.approx(1 / 0.98, rel=0.03), "as measured with twice the images"
    eager = (mfu("1xH200", MODELS[1], precision, compiled=False, batch=512) for precision in ("fp8", "bf16"))
    assert next(eager) < next(eager)
    tiny = "vit_tiny_patch16_224"
    assert mfu("1xH200", tiny, "fp8") == mfu("1xH200", tiny), "its layers are too small for float8"


def test_estimates_assume_compiled_blocks_unless_disabled() -> None:
    for wanted, compiled in ((None, True), (True, True), (False, False)):
        asked = planned_recipe(RecipeRequest(given={"model.name": MODELS[0], "train.compile": wanted}))
        model = MachineOptions(cluster="1xH100", num_classes=10).costs(asked).model
        assert model.compiled is compiled and model.estimated


def test_calibration_page_matches_the_predictions() -> None:
    compared = calibration.compare()
    page = (ROOT / "experiments/results/calibration_2026-11-30.md").read_text()
    for title, lines in calibration.SECTIONS.items():
        assert "\n".join(lines(compared)).strip() in page, f"{title}: write it by experiments/calibration.py"
    within = calibration.inside(compared)
    assert within[True] >= 0.8 * within.total()
    low, high = calibration.WEAK_SCALING
    assert low <= calibration.weak_scaling() <= high
    for kind, band in calibration.SHOWN.items():  # error bands are those of left-out runs
        errors = [one.error for one in calibration.alike(kind, compared)]
        assert (band.share, band.runs) == (calibration.band(errors), len(errors)), kind


def test_constants_are_those_fitted_to_all_runs() -> None:
    used = calibration.shipped()._asdict()
    for group, names in calibration.GROUPS.items():
        for name in names:
            assert getattr(calibration.fitted(group), name) == pytest.approx(used[name], rel=0.01), name


def test_predictions_are_judged_by_the_runs_that_resemble_them() -> None:
    def band(
        cluster: str, model: str = MODELS[1], precision: str = "bf16", compiled: bool = True, size: int = 64
    ) -> Band:
        config, hardware = model_config(model), find_cluster(cluster).hardware()
        profile = estimate_model(config, precision, hardware, ("tp1",), compiled=compiled)
        costs, plan = LayerCosts(config, hardware, profile), validate(parse(f"dp{hardware.ranks}"), config, 8 * size)
        found = uncertainty(price(plan, costs, 8 * size), costs)
        assert found is not None
        kind = found["share"], found["runs"]
        return next(one for one in (VITPAR, OTHERS, *BANDS.values()) if (one.share, one.runs) == kind)

    assert band("1xH100") == band("1xH200") == VITPAR
    for other in (
        band("1xH100", precision="fp8"),
        band("1xH100", "swin_tiny_patch4_window7_224"),
        band("1xH100", "vit_tiny_patch16_224", size=1),
    ):
        assert other == OTHERS
    assert band("1xA100") == BANDS[True, False]
    assert band("8xH100") == BANDS[True, True]
    assert band("1xH100", compiled=False) == BANDS[False, False]
    assert band("2xH100", compiled=False) == BANDS[False, True]


CONFIG = model_config("vit_custom", embed_dim=384, num_heads=12, depth=12, patch_size=16, image_size=224)
BATCH, BANDWIDTH = 64, 1e6
WEIGHTS, ACTIVATION = 4 * CONFIG.parameters, 4 * BATCH * CONFIG.tokens * CONFIG.embed_dim
"""Bytes of all parameters, and of the activation between two blocks for the complete batch."""


def costs_of(cards: int) -> LayerCosts:
    """Return costs on two nodes of two devices, where only the network takes time: BANDWIDTH bytes/s a card."""
    cluster = Cluster(
        name="slow",
        nodes=2,
        devices_per_node=2,
        device_name="drawn",
        memory_bytes=10**11,
        matmul={"float32": 1e18},
        memory_bandwidth=1e18,
        sustained=1.0,
        sustained_bandwidth=1.0,
        intra=Wire(bandwidth=1e15, latency=0.0),
        inter=Network(bandwidth=BANDWIDTH, latency=0.0, nics_per_node=cards),
    )
    hardware = cluster.hardware()
    return LayerCosts(CONFIG, hardware, estimate_model(CONFIG, "fp32", hardware, tensors(CONFIG, hardware.ranks)))


@pytest.mark.parametrize("cards", [2, 1])
@pytest.mark.parametrize(
    ("mesh", "fields", "expected"),
    [
        # One ring over both nodes sends 2 · 3/4 of the gradients, spread over the cards.
        ("dp4", {}, 3 / 2 * WEIGHTS / 2),
        # Two pairs, each with half of the parameters; pairs within a node cost nothing.
        ("dp2xfsdp2", {}, WEIGHTS / 2),
        # Two pairs across nodes gather half of the parameters twice, and reduce the gradients.
        ("fsdp2xdp2", {}, 3 * WEIGHTS / 2),
        ("fsdp4", {}, 3 * 3 / 4 * WEIGHTS / 2),
        # Each block sums its outputs twice in forward and twice in backward.
        ("tp2xdp2", {}, 4 * CONFIG.depth * ACTIVATION / 2),
        # The messages of four micro-batches follow each other; the last one of backward has none beside it.
        ("pp2xdp2", {"microbatches": 4}, (4 + 1) * ACTIVATION / 4 / 2),
        ("pp2xdp2", {"microbatches": 4, "schedule": "gpipe"}, (4 + 4) * ACTIVATION / 4 / 2),
    ],
)
def test_slow_networks_take_as_long_as_their_bytes(
    mesh: str, fields: dict[str, Any], expected: float, cards: int
) -> None:
    """expected: bytes on the busiest card, if a node has two."""
    costs = costs_of(cards)
    found = price(validate(replace(parse(mesh), **fields), CONFIG, BATCH), costs, BATCH)
    assert found.seconds == pytest.approx(2 / cards * expected / BANDWIDTH, rel=0.02)
