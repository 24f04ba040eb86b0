"""Prices and searches of models whose layers share parameters."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest

import vitpar
from helpers.plans import ZBV
from helpers.shared_models import Relative, Tied
from vitpar import parse, validate
from vitpar.models import model_config
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.links import sharing_group
from vitpar.planner.cost.price import price
from vitpar.planner.describe import summarize
from vitpar.planner.profile.cluster import find_cluster
from vitpar.planner.profile.estimate import FITTED, estimate_model, tensors
from vitpar.planner.search.best import Search
from vitpar.planner.search.space import Space
from vitpar.planner.sources import estimated_costs

WIDE = Tied(num_classes=4096, width=192, hidden=768, depth=6)
BATCH = 64


@dataclass(frozen=True)
class Separate(Tied):
    """Tied with a second matrix in the head."""

    @property
    def shared(self) -> dict[str, str]:
        return {}


@pytest.mark.parametrize(
    ("mesh", "more", "parts"),
    [
        ("dp4", {}, 0),
        ("pp2xdp2", {}, 1),
        ("pp4", {}, 1),
        ("pp2xfsdp2", {}, 2),
        ("pp2xdp2+zero1", {}, 2),
        ("pp2xdp2", ZBV, 0),  # the first and the last stage are on one rank
    ],
)
def test_stages_that_share_a_matrix_add_its_gradients_once_a_step(
    mesh: str, more: dict[str, object], parts: int
) -> None:
    """The sum takes as long as an all-reduce of this rank's shard. parts: shards of the matrix; 0 for no sum."""
    plan = validate(replace(parse(mesh), **more), WIDE, BATCH)
    every = [estimated_costs(config, "2x2xL40S", "fp32") for config in (WIDE, Separate(**asdict(WIDE)))]
    tied, apart = (price(plan, costs, BATCH) for costs in every)
    links, shard = every[0].links, 4096 * 192 * 4 / (parts or 1)
    group = sharing_group(plan, (0, plan.pipeline_degree - 1), 2)
    assert group.nodes == 2 or not parts
    expected = links.seconds("all_reduce", group, shard) if parts else 0.0
    assert tied.seconds - apart.seconds == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert sum(tied.time.values()) == pytest.approx(tied.seconds)
    assert tied.memory == apart.memory, "each layer has a tensor of its own"


@pytest.mark.parametrize(
    ("model", "gigabytes", "words", "microbatches"),
    [("bert_large", 4, "dp8+zero2", 2), ("t5_large", 4, "tp2xdp4+zero2", 8)],
)
def test_search_mixes_strategies_where_embed_and_head_share_a_matrix(
    model: str, gigabytes: int, words: str, microbatches: int
) -> None:
    """Blocks at both ends may differ: embed, head and a T5's decoder embedding have the strategy of one of them.

    words: fastest uniform plan that fits
    """
    config, hardware = model_config(model), find_cluster("8xA100").hardware()
    fitted = FITTED._replace(host=0.0)  # so few images would wait for the host
    profile = estimate_model(config, "bf16", hardware, tensors(config, 8), compiled=True, fitted=fitted)
    costs = LayerCosts(config, hardware, profile)
    flags: dict[str, Any] = {"roles": ("dp", "fsdp", "tp"), "flags": ("zero1", "zero2")}
    space = Space(costs.config, 8, (BATCH,), precision="bf16", compiled=True, **flags)
    best = Search(space, costs).best(gigabytes * 1e9).plans[0]
    assert validate(best.plan, costs.config, BATCH) == best.plan
    uniform = price(validate(replace(parse(words), microbatches=microbatches), costs.config, BATCH), costs, BATCH)
    assert max(uniform.memory_bytes, best.memory_bytes) <= gigabytes * 1e9
    assert best.images_per_second > 1.01 * uniform.images_per_second


def test_summary_says_how_gradients_of_shared_parameters_are_added() -> None:
    shared: list[tuple[vitpar.ModelConfig, dict[str, object], str]] = [
        (Tied(), {}, "stages 0 and 1 all-reduce the gradients of their copies, once a step"),
        (Tied(), ZBV, "each layer has a copy, with the sum of their gradients"),
        (Relative(), {}, "every rank has all of it; all ranks all-reduce its gradients, once a step"),
    ]
    for config, more, words in shared:
        summary = summarize(config, validate(replace(parse("pp2"), **more), config, 16), 16, "fp32", 16)
        assert [(one["owner"], tuple(one["copies"]), one["communication"]) for one in summary["shared"]] == [
            (owner, names[1:], words) for owner, names in config.holders.items()
        ]
        assert summary["parameters"] == config.parameters
    assert WIDE.parameters == Separate(**asdict(WIDE)).parameters - 4096 * 192
