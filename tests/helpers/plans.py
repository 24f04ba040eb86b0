"""Plans that the tests and the support matrix in the docs cover."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar

from hypothesis import strategies as st

from vitpar.errors import StrategyError
from vitpar.parallel import Communication
from vitpar.strategy import Strategy, parse
from vitpar.strategy.support import features


@dataclass(frozen=True)
class Case:
    """Plan of a tiny ViT, with the options of the check."""

    mesh: str
    """Strategy string."""

    plan: dict[str, Any] = field(default_factory=dict)
    """Other fields of the plan."""

    model: dict[str, Any] = field(default_factory=dict)
    """Options of the tiny ViT, which has 12 heads."""

    check: dict[str, Any] = field(default_factory=dict)
    """Options of `helpers.parity.check`."""

    batch: int = 16
    """Images per step."""

    family: ClassVar[str] = "ViT"
    """Family of the model."""

    @property
    def ranks(self) -> int:
        """Return the number of ranks the plan needs."""
        return parse(self.mesh).world_size

    @property
    def sizes(self) -> dict[str, Any]:
        """Return the model's options. The model has 4 blocks, or 8 if the plan names blocks or has many stages."""
        plan = parse(self.mesh)
        few = plan.is_uniform and plan.pp * self.plan.get("virtual_stages", 1) <= 4 and "split" not in self.plan
        return {"num_classes": 10, "depth": 4 if few else 8, "drop_path": 0.1, **self.model}

    @property
    def features(self) -> frozenset[str]:
        """Return all features of the case: those of the support matrix, and the names of its settings."""
        plan = replace(parse(self.mesh), **self.plan)
        found = features(plan, self.check.get("precision", "fp32"), False)
        found |= {f"{part}.{key}" for part in ("plan", "model", "check") for key in getattr(self, part)}
        if communication := self.check.get("communication"):
            found |= {name for name, value in vars(communication).items() if value is not None}
        if plan.is_uniform:
            found.add(" x ".join(sorted(["pp"] * (plan.pp > 1) + [axis.role for axis in plan.strategy.axes])))
        else:
            found.add(f"layerwise, pp{plan.pp}")
        return frozenset(found)

    def __str__(self) -> str:
        settings = [f"{k}={v}" for part in (self.plan, self.model, self.check) for k, v in part.items()]
        return " ".join([self.mesh, *settings])


INTERLEAVED = {"schedule": "interleaved1f1b", "virtual_stages": 2}
EVERYTHING = {
    "drop_path": 0.1,
    "dropout": 0.1,
    "qk_norm": True,
    "layer_scale": 0.1,
    "num_reg_tokens": 2,
    "distillation": True,
}

ZERO_BUBBLE = {"schedule": "interleavedzerobubble", "virtual_stages": 2}
ZBV = {"schedule": "zbvzerobubble", "virtual_stages": 2}
DUALPIPEV = {"schedule": "dualpipev", "virtual_stages": 2}
FP64 = {"precision": "fp64"}
ODD = {"pool": "avg", "position": "sincos2d", "representation_size": 48}
T196 = {"image_size": 56, "patch_size": 4, "depth": 2, "pool": "avg"}
T197 = {"image_size": 56, "patch_size": 4, "depth": 2}

CASES = (
    # every role alone
    Case("dp1"),
    Case("dp1", {"microbatches": 4}),
    Case("dp2"),
    Case("fsdp2"),
    Case("tp2"),
    Case("pp2"),
    Case("dp4", {"microbatches": 2}),
    Case("fsdp4"),
    Case("tp4"),
    Case("pp4"),
    Case("dp8"),
    Case("fsdp8"),
    Case("pp8"),
    # degrees that are not powers of two
    Case("tp3xfsdp2", batch=12),
    Case("tp2xdp3", batch=24),
    Case("pp3xfsdp2", {"split": (2, 3, 3)}, batch=24),
    # pairs, both orders where the order matters
    Case("dp2xfsdp2"),
    Case("fsdp2xdp2"),
    Case("dp2xtp2"),
    Case("tp2xdp2"),
    Case("fsdp2xtp2"),
    Case("tp2xfsdp2"),
    Case("pp2xdp2"),
    Case("pp2xfsdp2"),
    Case("pp2xtp2"),
    Case("tp2xpp2"),
    # triples and all four
    Case("pp2xtp2xdp2"),
    Case("pp2xdp2xtp2"),
    Case("tp2xdp2xpp2"),
    Case("pp2xtp2xfsdp2"),
    Case("dp2xfsdp2xtp2"),
    Case("pp2xdp2xfsdp2"),
    # schedules, micro-batches, stages
    Case("pp2", {"schedule": "gpipe"}),
    Case("pp4xdp2", {"schedule": "gpipe", "microbatches": 8}),
    Case("pp2xtp2", {"schedule": "gpipe"}),
    Case("pp2", INTERLEAVED),
    Case("pp2xtp2xdp2", INTERLEAVED),
    Case("pp2xfsdp2", {**INTERLEAVED, "microbatches": 4}),
    Case("pp2xdp2", {"microbatch_size": 2}),
    Case("pp2", model={"depth": 5}),
    Case("pp2xfsdp2", {"split": "balanced"}, model={"depth": 5}),
    Case("pp2xdp2", {"split": (3, 5)}),
    # checkpointing
    Case("dp1+ckpt"),
    Case("fsdp2xtp2+ckpt"),
    Case("pp2xtp2xdp2+ckpt", model=EVERYTHING),
    Case("dp2xfsdp2+ckpt"),
    Case("pp2+ckpt", INTERLEAVED),
    # model options, with a number of classes that tp does not divide
    Case("dp1", model=EVERYTHING),
    Case("tp4xfsdp2", model={**EVERYTHING, "num_classes": 7}),
    Case("pp2xtp2xdp2", model={**EVERYTHING, "num_classes": 7}),
    Case("tp2xdp2", model={"pool": "avg", "position": "sincos2d", "representation_size": 48}),
    # precision
    Case("pp2xtp2xdp2", check={"precision": "fp64"}),
    Case("dp2xfsdp2", check={"precision": "fp64"}),
    Case("pp2xfsdp2", INTERLEAVED, check={"precision": "fp64"}),
    Case("dp1", check={"precision": "bf16"}),
    Case("dp2xfsdp2", check={"precision": "bf16"}),
    Case("pp2xfsdp2", INTERLEAVED, check={"precision": "bf16"}),
    Case("pp2xtp2xdp2", check={"precision": "bf16"}),
    Case("fsdp2xtp2", check={"precision": "bf16"}),
    Case("pp2xtp2xdp2", check={"precision": "fp16"}),
    Case("tp2xfsdp2", model=EVERYTHING, check={"precision": "fp16"}),
    Case("dp2xfsdp2", check={"precision": "fp16", "reduce_dtype": "fp16"}),
    Case("dp1", {"microbatches": 4}, check={"precision": "fp8"}),
    Case("pp2xtp2xdp2", model=EVERYTHING, check={"precision": "fp8"}),
    Case("tp2xfsdp2+sp+ckpt.selective", check={"precision": "fp8", "reduce_dtype": "bf16"}),
    Case("tp4+2d", check={"precision": "fp8"}),
    Case("tp2xdp2", check={"precision": "fp8", "train__fp8_min_features": 97}),  # all but proj
    Case("pp2", ZBV, check={"precision": "fp8"}),
    # the loss
    Case("pp2xtp2xdp2", check={"label_smoothing": 0.1}),
    Case("pp2xtp2xdp2", check={**FP64, "task__options": {"bce": True, "bce_target_threshold": 0.0}}),
    Case("tp2xfsdp2+sp", check={"label_smoothing": 0.1, "task__options": {"bce": True, "bce_positive_weight": 3.0}}),
    Case("tp2xdp2", model={"num_classes": 5}, check={**FP64, "task__options": {"class_weights": [0.5, 1, 2, 0, 1.5]}}),
    Case("pp2xdp2", model={"num_classes": 5}, check={"task__options": {"class_weights": [0.5, 1, 2, 0, 1.5]}}),
    # optimizers on mixed meshes
    Case("tp2xfsdp2", check={"optimizer": "foreach"}),
    Case("tp2xfsdp2", check={"optimizer": "fused"}),
    Case("pp2xtp2xdp2", check={"optimizer": "for-loop"}),
    # zero1 and zero2
    Case("dp4+zero1", {"microbatches": 2}),
    Case("dp4+zero2", {"microbatches": 2}),
    Case("dp2xtp2+zero1", check=FP64),
    Case("dp2xtp2+zero2", check={"precision": "bf16"}),
    Case("pp2xdp2+zero1"),
    Case("pp2xdp2+zero2", check=FP64),
    Case("pp2xdp2+zero1", ZBV),
    Case("pp2xdp2+zero2", INTERLEAVED),
    Case("dp3+zero2+ckpt", batch=24),
    # +sp, which also splits the images of a micro-batch over tp
    Case("tp2+sp", check=FP64),
    Case("tp4+sp", model=EVERYTHING, check=FP64),
    Case("tp3xfsdp2+sp", batch=36, check=FP64),
    Case("tp2xdp2+sp", model=ODD, check=FP64),
    Case("dp2xtp2+sp", {"microbatches": 2}),
    Case("tp2xdp2xfsdp2+sp", check=FP64),
    Case("pp2xtp2+sp", check=FP64),
    Case("pp2xtp2xfsdp2+sp", model=EVERYTHING),
    Case("pp2xtp2+sp", INTERLEAVED, batch=16),
    Case("pp2xtp2xdp2+sp", ZBV, batch=32),
    Case("tp2xfsdp2+sp+ckpt", check={"precision": "bf16"}),
    # 2d
    Case("tp4+2d", check=FP64),
    Case("tp4+2d", model=EVERYTHING, check=FP64),
    Case("tp4+2d", model=ODD, check=FP64),
    Case("tp4+2d", {"microbatches": 4}),
    Case("tp4+2d", model={"norm_eps": 0.1}, check=FP64),
    Case("tp4xdp2+2d", check=FP64),
    Case("dp2xtp4+2d", model=EVERYTHING),
    Case("fsdp2xtp4+2d", check=FP64),
    Case("tp4xdp2+2d+zero1"),
    Case("pp2xtp4+2d", check=FP64),
    Case("pp2xtp4+2d", INTERLEAVED),
    Case("pp2xtp4+2d", ZERO_BUBBLE),
    Case("pp2xtp4+2d", ZBV, check=FP64),
    Case("pp2xtp4+2d+ckpt", model=EVERYTHING),
    Case("tp4+2d", check={"precision": "bf16"}),
    # 2.5d
    Case("tp8+2.5d@2", check=FP64),
    Case("tp8+2.5d", model=EVERYTHING, check=FP64),
    Case("tp8+2.5d", {"microbatches": 2}, model=ODD),
    Case("tp8+2.5d+ckpt", check={"precision": "bf16"}),
    # 3d
    Case("tp8+3d", check=FP64),
    Case("tp8+3d", model=EVERYTHING, check=FP64),
    Case("tp8+3d", {"microbatches": 2}, model=ODD, check=FP64),
    Case("tp8+3d+ckpt", model={"num_classes": 7}),
    Case("tp8+3d", check={"precision": "bf16"}),
    # zero-bubble and V-shaped schedules
    Case("pp2", ZERO_BUBBLE),
    Case("pp2", ZBV, check=FP64),
    Case("pp2", DUALPIPEV, check=FP64),
    Case("pp4", ZBV),
    Case("pp4", DUALPIPEV, model=EVERYTHING),
    Case("pp4", {**ZERO_BUBBLE, "microbatches": 8}),
    Case("pp3xdp2", {**DUALPIPEV, "split": (1, 1, 2, 2, 1, 1)}, batch=24),
    Case("pp2xdp2", ZBV),
    Case("pp2xfsdp2", ZERO_BUBBLE, check=FP64),
    Case("pp2xfsdp2", DUALPIPEV),
    Case("pp2xdp2xfsdp2", ZBV),
    Case("pp2xtp2", ZBV, model=EVERYTHING),
    Case("pp2xtp2xdp2", DUALPIPEV, check=FP64),
    Case("pp2xtp2xfsdp2", ZERO_BUBBLE, check={"precision": "bf16"}),
    Case("pp2", {**ZBV, "split": (1, 3, 3, 1)}),
    # hybrid sharding under every kind of schedule
    Case("pp2xdp2xfsdp2", INTERLEAVED, check=FP64),
    Case("pp2xfsdp2xdp2", {"schedule": "gpipe"}),
    # memory
    Case("dp2+ckpt.selective"),
    Case("tp2xfsdp2+ckpt.selective", check=FP64),
    Case("tp2xfsdp2+sp+ckpt.selective", model=EVERYTHING),
    Case("tp4+2d+ckpt.selective"),
    Case("pp2xtp2+ckpt.selective", INTERLEAVED),
    Case("fsdp2+offload"),
    Case("tp2xdp2+zero1+offload", check={"precision": "bf16"}),
    Case("pp2xfsdp2+offload+ckpt"),
    # micro-batches of one image a rank
    Case("dp1", {"microbatches": 16}, check=FP64),
    Case("fsdp2", {"microbatches": 8}, model=EVERYTHING, check=FP64),
    Case("tp4+2d", {"microbatches": 4}, model=EVERYTHING, batch=8, check=FP64),
    Case("pp2xtp2+sp", {"microbatches": 4}, batch=8, check=FP64),
    # timing of the communication
    Case("dp2", check={"communication": Communication(bucket_cap_mb=0.5)}),
    Case("fsdp2", {"microbatches": 2}, check={"communication": Communication(prefetch=2)}),
    Case("pp2xfsdp2", check={"communication": Communication(reshard_after_forward=True)}),
    Case("pp2xfsdp2", check={"communication": Communication(reduce_every_microbatch=True)}),
    Case("dp2xfsdp2", {"microbatches": 2}, check={"communication": Communication(reduce_every_microbatch=True)}),
    Case("tp4+2d", {"microbatches": 2}, check={"communication": Communication(reduce_every_microbatch=True)}),
    Case(
        "pp1: 0-3=dp2, *=fsdp2",
        {"microbatches": 2},
        check={"communication": Communication(reduce_every_microbatch=True)},
    ),
    # 197 tokens, which no degree divides, and 196, which some do
    Case("tp2xfsdp2+sp", model=T197, batch=8),
    Case("tp2xfsdp2+sp", model=T196, batch=8),
    Case("tp4+2d", model=T197, batch=8),
    Case("tp8+3d", model=T196, batch=8),
    # layer by layer
    Case("pp1: embed=fsdp4, 0-3=tp2xfsdp2, *=dp4+ckpt", check=FP64),
    Case("pp1: 0-3=dp4, 4-7=fsdp4"),
    Case("pp1: embed=dp4, 0-1=dp2xtp2, 2-3=tp2xdp2, 4-5=tp4, *=dp4", model=EVERYTHING, check=FP64),
    Case("pp1: 0-1=tp4+2d, 2-3=tp4+sp, 4-5=tp4, *=fsdp2xdp2", model=EVERYTHING, check=FP64),
    Case("pp1: embed=tp8+3d, 0-2=tp8+2.5d, 3-5=dp2xtp4+2d, *=fsdp4xtp2+sp", check=FP64),
    # Partial gradients over the same ranks: of two meshes, and of layers with fully_shard and without it.
    Case("pp1: 0-3=dp2xfsdp2xtp2+sp, *=fsdp4xtp2+sp", check=FP64),
    Case("pp1: 0-3=tp2xfsdp2+sp, *=tp2xdp2+sp", check=FP64),
    Case("pp1: embed=dp6, 0-1=tp3xdp2, 2-3=dp2xtp3, 4-5=tp2xfsdp3, *=fsdp6", batch=36, check=FP64),
    Case("pp1: 0-3=dp2xtp3, 4-7=fsdp3xtp2", batch=36),
    Case("pp2: embed=fsdp4, 0-3=tp2xfsdp2, *=fsdp4+ckpt", check=FP64),
    Case("pp2: embed=dp2, 0-3=dp2, *=tp2", check=FP64),
    Case("pp2: 0-3=tp2, *=dp2+zero1", model=EVERYTHING, check=FP64),
    Case("pp2: 0-1=tp2+sp, 3-4=dp2, 6=tp2, *=fsdp2", INTERLEAVED, check=FP64),
    Case("pp2: 0-1=tp2, 3-4=dp2, 6=tp2+sp, *=fsdp2", ZBV, check=FP64),
    Case("pp2: 0-2=tp4+2d, 3-4=tp2xdp2, *=dp4+zero2", check={"precision": "bf16"}),
    Case("pp2: 0-3=dp2xfsdp2, head=tp4, *=tp4+2d+ckpt", {"schedule": "gpipe"}),
    Case("pp3: 0-2=dp2, 3-5=tp2, *=fsdp2", {"split": (3, 3, 2)}, batch=24),
    Case("pp1: 0-3=dp2+ckpt, 4-5=dp2+ckpt.selective, *=dp2+zero2", {"microbatches": 2}),
    Case("pp1: embed=dp2+offload, 0-3=fsdp2+offload, *=dp2"),
)


def representatives(cases: Sequence[Case], goals: Callable[[Case], Collection[Any]]) -> list[Case]:
    """Return few cases that reach every goal that `cases` reach, chosen greedily by new goals per rank.

    goals: what a case covers, such as its features
    """
    waiting = [(case, frozenset(goals(case)), case.ranks) for case in cases]
    missing = frozenset().union(*(reached for _, reached, _ in waiting))
    found = []
    while missing:
        best, reached, _ = max(waiting, key=lambda item: len(missing & item[1]) / item[2])
        missing -= reached
        found.append(best)
    return found


@st.composite
def strategies_of(draw: st.DrawFn, ranks: int) -> Strategy:
    """Draw a strategy for `ranks` ranks: any degrees, also not powers of two, in any order, with any flags."""
    axes, left = [], ranks
    for role in draw(st.permutations(("dp", "fsdp", "tp"))):
        degree = draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0]))
        axes, left = [*axes, f"{role}{degree}"], left // degree
    axes[-1] = axes[-1].rstrip("0123456789") + str(int(axes[-1].lstrip("dpfst")) * left)
    flags = [draw(st.sampled_from(["", f"+{name}"])) for name in ("zero1", "zero2")]
    tensor = draw(st.sampled_from(["", "+sp", "+2d", "+2.5d", "+3d"]))
    checkpoint = draw(st.sampled_from(["", "+ckpt", "+ckpt.selective"]))
    for choice in (tensor + flags[0], tensor + flags[1] * (not flags[0]), tensor, flags[1], ""):
        try:
            return parse("x".join(axes) + choice + checkpoint).strategy
        except StrategyError:
            continue
    raise AssertionError(axes)


@st.composite
def layerwise(draw: st.DrawFn, ranks: int, depth: int) -> Case:
    """Draw a layerwise plan for `ranks` ranks and a model of `depth` blocks."""
    pp = draw(st.sampled_from([n for n in (1, 2, 3) if ranks % n == 0]))
    schedules = [{"schedule": "gpipe"}, {}, INTERLEAVED, ZERO_BUBBLE, ZBV, DUALPIPEV]
    plan = draw(st.sampled_from(schedules)) if pp > 1 else {"microbatches": draw(st.sampled_from([1, 2]))}
    bounds = sorted(draw(st.sets(st.integers(0, depth), min_size=2, max_size=4)))
    names = [f"{a}-{b - 1}" for a, b in pairwise(bounds)]
    names += draw(st.sets(st.sampled_from(["embed", "head"])).map(sorted))
    groups = [f"{name}={draw(strategies_of(ranks // pp))}" for name in (*names, "*")]
    return Case(f"pp{pp}: {', '.join(groups)}", plan)
