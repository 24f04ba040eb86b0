"""Validation of plans for a model and a batch: defaults, refusals, and the rules of torch's schedules."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.sentences import says
from vitpar.errors import StrategyError
from vitpar.models.description import LayerDescription, TensorSpec
from vitpar.strategy import BatchArithmetic, Plan, batch_arithmetic, parse, stages_of_rank, validate
from vitpar.strategy.batch import schedule_objection


@dataclass(frozen=True)
class Model:
    """A model with only the numbers that plans depend on."""

    name: str = "vit"
    depth: int = 8
    num_heads: int = 12
    mlp_hidden_dim: int = 768
    features: int = 192
    embed_dim: int = 192
    groups: Mapping[str, range] = field(default_factory=dict)
    holders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tables: frozenset[str] = frozenset()

    @property
    def layers(self) -> Mapping[str, LayerDescription]:
        tokens = TensorSpec(4, self.embed_dim)
        numbers = {"head": self.num_heads, "hidden feature": self.mlp_hidden_dim}
        found = [LayerDescription("embed", "embed", None, tokens, ())]
        found += [
            LayerDescription(f"blocks.{i}", "block", tokens, tokens, (), divisible=numbers) for i in range(self.depth)
        ]
        divisible = {"classifier feature": self.features}
        found.append(LayerDescription("head", "head", tokens, TensorSpec(1, 10), (), divisible=divisible, last=True))
        return {layer.name: layer for layer in found}


SMALL = Model("vit_small_patch16_224", depth=12, num_heads=6, mlp_hidden_dim=1536, features=384)


def plan_of(text: str, **fields: Any) -> Plan:
    return replace(parse(text), **fields)


def interleaved(text: str, virtual_stages: int = 2, **fields: Any) -> Plan:
    return plan_of(text, schedule="interleaved1f1b", virtual_stages=virtual_stages, **fields)


@pytest.mark.parametrize(
    ("plan", "batch_size", "expected"),
    [
        (parse("tp2xdp2"), 32, BatchArithmetic(32, 2, 16, 1, 16)),
        (parse("dp2xfsdp4"), 32, BatchArithmetic(32, 8, 4, 1, 4)),
        (plan_of("dp2", microbatches=4), 32, BatchArithmetic(32, 2, 16, 4, 4)),
        (plan_of("dp2", microbatch_size=8), 32, BatchArithmetic(32, 2, 16, 2, 8)),
        # with pp, the default is the valid number nearest to twice the pipeline degree
        (parse("pp2xtp2xdp2"), 32, BatchArithmetic(32, 2, 16, 4, 4)),
        (parse("pp4"), 64, BatchArithmetic(64, 1, 64, 8, 8)),
        (parse("pp4"), 12, BatchArithmetic(12, 1, 12, 6, 2)),
        (parse("pp4"), 30, BatchArithmetic(30, 1, 30, 10, 3)),
        (parse("pp4"), 4, BatchArithmetic(4, 1, 4, 4, 1)),
        (parse("pp2"), 254, BatchArithmetic(254, 1, 254, 2, 127)),
        (parse("pp2"), 7, BatchArithmetic(7, 1, 7, 7, 1)),
        (plan_of("pp4", schedule="gpipe"), 2, BatchArithmetic(2, 1, 2, 2, 1)),
        (interleaved("pp4"), 64, BatchArithmetic(64, 1, 64, 8, 8)),
        (interleaved("pp2"), 7, BatchArithmetic(7, 1, 7, 1, 7)),
        # layers that split their batch further, or differently
        (parse("tp4xdp2+2d"), 32, BatchArithmetic(32, 4, 8, 1, 8)),
        (parse("tp8+2.5d"), 32, BatchArithmetic(32, 4, 8, 1, 8)),
        (parse("tp8+3d"), 32, BatchArithmetic(32, 2, 16, 1, 16)),
        (parse("pp2xtp4+sp"), 24, BatchArithmetic(24, 1, 24, 3, 8)),
        (parse("pp1: 0-3=dp6, *=tp2xfsdp3"), 36, BatchArithmetic(36, 6, 6, 1, 6)),
        (parse("pp1: 0-3=dp2xtp3, *=tp2xfsdp3"), 36, BatchArithmetic(36, 6, 6, 1, 6)),
    ],
)
def test_batch_arithmetic(plan: Plan, batch_size: int, expected: BatchArithmetic) -> None:
    assert batch_arithmetic(plan, batch_size) == expected
    filled = validate(plan, Model(), batch_size)
    assert filled == replace(plan, microbatches=expected.microbatches, microbatch_size=None)
    assert validate(filled, Model(), batch_size) == filled
    assert batch_arithmetic(filled, batch_size) == expected


@given(
    st.sampled_from(["pp2", "pp3xdp2", "pp4xfsdp2", "dp3"]),
    st.sampled_from([("gpipe", 1), ("1f1b", 1), ("interleaved1f1b", 2)]),
    st.integers(1, 200),
)
def test_default_microbatches_are_valid_or_refused(text: str, schedule: tuple[str, int], batch_size: int) -> None:
    plan = plan_of(text, schedule=schedule[0], virtual_stages=schedule[1])
    try:
        parts = batch_arithmetic(plan, batch_size)
    except StrategyError:
        local, rest = divmod(batch_size, plan.data_parallel)
        assert rest or (plan.schedule == "1f1b" and local < plan.num_stages)
    else:
        assert parts.data_parallel * parts.microbatches * parts.microbatch_size == batch_size
        assert schedule_objection(plan, parts.microbatches) is None


def test_fields_that_depend_on_the_batch_stay_open_without_one() -> None:
    assert validate(parse("dp2"), Model(), None).microbatches == 1
    assert validate(parse("pp2"), Model(), None).microbatches is None
    assert validate(plan_of("pp2", microbatches=6), Model(), None).microbatches == 6
    sized = plan_of("dp2", microbatch_size=4)
    assert validate(sized, Model(), None) == sized


@pytest.mark.parametrize("split", ["even", "balanced", (2, 6)])
def test_valid_splits_are_kept(split: str | tuple[int, ...]) -> None:
    assert validate(plan_of("pp2", split=split), Model(), 8).split == split


@pytest.mark.parametrize(
    ("plan", "shape", "message"),
    [
        (parse("tp4xdp2"), SMALL, "tp4 does not divide the 6 heads of vit_small_patch16_224: use tp2, tp3 or tp6"),
        (parse("tp2"), Model(num_heads=1), "tp2 does not divide the 1 head of vit: leave tp out"),
        (parse("tp2"), Model(num_heads=3, mlp_hidden_dim=6), "tp2 does not divide the 3 heads of vit: use tp3"),
        (parse("tp3"), Model(num_heads=12, mlp_hidden_dim=512), "tp3 does not divide the 512 hidden…: use tp2 or tp4"),
        (parse("tp2xdp"), Model(), "the degree of 'dp' is open: give it a number or resolve it for a world size"),
        (parse("pp9"), Model(), "pp9 makes 9 stages but vit has 8 blocks: use at most 8 stages, as in pp8"),
        (interleaved("pp4"), Model(depth=5), "pp4 with 2 virtual stages…: use at most 5 stages, as in pp2 with 2"),
        (interleaved("pp2", 3), Model(depth=5), "pp2 with 3 virtual stages makes 6 stages but…: use at most 5 stages"),
        (parse("tp4+2d"), Model(num_heads=3, mlp_hidden_dim=6, features=6, embed_dim=6), "the side 2 of tp4+2d does…"),
        (parse("tp8+3d"), Model(embed_dim=191), "the side 2 of tp8+3d does not divide the 191 features of vit…"),
        (plan_of("pp2", schedule="zbvzerobubble"), Model(), "schedule zbvzerobubble needs…: set virtual_stages to 2"),
        (plan_of("dp2", split=(4, 4)), Model(), "split 4,4 is for 2 stages but the plan…: give 1 number with sum 8"),
        (plan_of("dp4", schedule="gpipe"), Model(), "schedule gpipe…: add an axis such as pp2, or use schedule 1f1b"),
        (interleaved("dp4"), Model(), "schedule interleaved1f1b…: add an axis such as pp2, or use schedule 1f1b"),
        (interleaved("pp2", 1), Model(), "schedule interleaved1f1b…: set virtual_stages to 2, or use schedule 1f1b"),
        (plan_of("pp2", schedule="gpipe", virtual_stages=2), Model(), "schedule gpipe has 1 stage per rank, not 2…"),
    ],
)
@pytest.mark.parametrize("batch_size", [None, 36])
def test_plans_that_do_not_fit_the_model_are_refused(
    plan: Plan, shape: Model, message: str, batch_size: int | None
) -> None:
    with says(message):
        validate(plan, shape, batch_size)


@pytest.mark.parametrize(
    ("plan", "batch_size", "message"),
    [
        (parse("dp2"), 0, "the batch size is 0: use 1 to 16,777,216"),
        (plan_of("dp2", microbatches=2, microbatch_size=4), 8, "both microbatches (2) and microbatch_size (4)…"),
        (parse("dp4xfsdp2"), 100, "a batch of 100 samples does not divide into the 8 data-parallel…: use 96 or 104"),
        (parse("dp4"), 1, "a batch of 1 sample does not divide into the 4 data-parallel parts of 'dp4': use 4"),
        (plan_of("dp2", microbatches=12), 64, "12 micro-batches cannot split the 32 samples of a…: use 4, 8 or 16"),
        (
            plan_of("dp2", microbatch_size=5),
            64,
            "micro-batches of 5 samples cannot…: use a microbatch_size of 2, 4 or 8",
        ),
        (plan_of("dp2", microbatch_size=64), 64, "micro-batches of 64 samples…: use a microbatch_size of 8, 16 or 32"),
        (parse("pp4xdp2"), 4, "schedule 1f1b over 4…: use a batch of 8 or more, fewer stages, or schedule gpipe"),
        (plan_of("pp4", microbatches=2), 16, "schedule 1f1b over 4 stages needs at least 4…: use 4, 8 or 16"),
        (plan_of("pp4xdp2", microbatches=2), 12, "schedule 1f1b over 4 stages needs…: use 6"),
        (plan_of("pp4", microbatch_size=8), 16, "schedule 1f1b over 4 stages…: use a microbatch_size of 1, 2 or 4"),
        (interleaved("pp4", microbatches=9), 36, "schedule interleaved1f1b over pp4 cannot run 9…: use 4, 6 or 12"),
        (parse("tp4xdp2+sp"), 20, "the 10 samples of a data-parallel part (batch 20 over…: use a batch of 16 or 24"),
        (
            plan_of("tp4xdp2+sp", microbatches=4),
            16,
            "4 micro-batches cannot…, 4 samples at a time, as 'tp4xdp2+sp' does over tp: use 1 or 2",
        ),
    ],
)
def test_batches_that_do_not_fit_the_plan_are_refused(plan: Plan, batch_size: int, message: str) -> None:
    for check in (lambda: batch_arithmetic(plan, batch_size), lambda: validate(plan, Model(), batch_size)):
        with says(message):
            check()


def test_schedule_rules_match_torch() -> None:
    """torch's schedule constructors accept exactly the numbers of micro-batches that vitpar accepts."""
    import torch
    from torch.distributed import pipelining
    from torch.distributed.pipelining.schedules import get_schedule_class

    def stage(index: int, plan: Plan) -> Any:
        place = {"stage_index": index, "num_stages": plan.num_stages, "is_first": index == 0, "is_last": False}
        group = {"group": None, "group_size": plan.pp, "group_rank": index % (plan.pp or 1)}
        return SimpleNamespace(**place, **group, submod=torch.nn.Identity(), device="cpu", has_backward=True)

    def torch_accepts(plan: Plan, microbatches: int) -> bool:
        try:
            if plan.schedule == "gpipe":
                pipelining.ScheduleGPipe(stage(0, plan), microbatches)
            elif plan.schedule == "1f1b":
                pipelining.Schedule1F1B(stage(0, plan), microbatches)
            else:
                stages = [stage(index, plan) for index in stages_of_rank(0, plan)]
                get_schedule_class(plan.schedule)(stages, microbatches, loss_fn=lambda *_: None)
        except ValueError:
            return False
        return True

    for pp in (2, 3, 4):
        for plan in (
            plan_of(f"pp{pp}", schedule="gpipe"),
            parse(f"pp{pp}"),
            *(
                plan_of(f"pp{pp}", schedule=name, virtual_stages=2)
                for name in ("interleaved1f1b", "interleavedzerobubble", "zbvzerobubble", "dualpipev")
            ),
        ):
            for microbatches in range(1, 14):
                accepted = schedule_objection(plan, microbatches) is None
                assert accepted == torch_accepts(plan, microbatches), (str(plan), plan.schedule, microbatches)
