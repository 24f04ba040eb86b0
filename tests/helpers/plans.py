"""Plans of tiny models of every family, and the choice of the command that tests each of them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import strategies as st

from helpers.modern_vits import PARTS
from vitpar.errors import StrategyError
from vitpar.parallel import Communication
from vitpar.strategy import Strategy, parse
from vitpar.strategy.support import features


@dataclass(frozen=True)
class Case:
    """Plan of a tiny model, with the options of the check."""

    mesh: str
    """Strategy string."""

    plan: dict[str, Any] = field(default_factory=dict)
    """Other fields of the plan."""

    model: dict[str, Any] = field(default_factory=dict)
    """Options of the model."""

    check: dict[str, Any] = field(default_factory=dict)
    """Options of `check_plan`, and settings of the recipe as `helpers.parity.recipe_of` takes them."""

    batch: int = 16
    """Samples per step."""

    family: str = "ViT"
    """Family of the model, in BUILDERS or TASKS of `helpers.parity`."""

    parts: str = ""
    """Name in `helpers.modern_vits.PARTS`, for the family "modern ViT"."""

    @property
    def ranks(self) -> int:
        """Return the number of ranks the plan needs."""
        return parse(self.mesh).world_size

    @property
    def depth(self) -> int:
        """Return the blocks of a ViT: 2, or 4 if the plan or freezing names blocks; at least one per stage."""
        plan = parse(self.mesh)
        named = not plan.is_uniform or "train__freeze" in self.check
        return max(4 if named else 2, plan.pp * self.plan.get("virtual_stages", 1))

    @property
    def features(self) -> frozenset[str]:
        """Return all features of the case: those of the support matrix, and the names of its settings."""
        plan = replace(parse(self.mesh), **self.plan)
        found = features(plan, self.check.get("precision", "fp32"), False)
        settings = [f"{part}.{key}" for part in ("plan", "model", "check") for key in getattr(self, part)]
        found |= {setting for setting in settings if not setting.endswith("_steps")}
        found.add(f"optimizer {self.check.get('optimizer__name', 'adamw')}")
        if communication := self.check.get("communication"):
            found |= {name for name, value in vars(communication).items() if value is not None}
        if plan.is_uniform:
            found.add(" x ".join(sorted(["pp"] * (plan.pp > 1) + [axis.role for axis in plan.strategy.axes])))
        else:
            found.add(f"layerwise, pp{plan.pp}")
        return frozenset(found | {f"model.{key}={value}" for key, value in PARTS.get(self.parts, {}).items()})

    def __str__(self) -> str:
        settings = [f"{k}={v}" for part in (self.plan, self.model, self.check) for k, v in part.items()]
        model = "" if self.family == "ViT" else self.parts or self.family
        return " ".join(filter(None, [model, self.mesh, *settings]))


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
GRADIENTS = {**FP64, "recipe_steps": 0}
"""Where layers are new, and steps of the recipe are not."""
ODD = {"pool": "avg", "position": "sincos2d", "representation_size": 48}

CASES = (
    # degrees that are not powers of two
    Case("tp3xfsdp2", batch=12),
    # pairs, triples and all four, both orders where the order matters
    Case("pp2xtp2"),
    Case("pp2xfsdp2xdp2"),
    Case("pp2xtp2xfsdp2"),
    Case("dp2xfsdp2xtp2"),
    # schedules, micro-batches, stages
    Case("pp2", {"schedule": "gpipe"}),
    Case("pp2xfsdp2", {"split": "balanced"}, model={"depth": 5}),
    Case("pp2+ckpt", INTERLEAVED),
    # model options, with a number of classes that tp does not divide
    Case("dp1", model=EVERYTHING),
    *(Case(mesh, model=EVERYTHING, check=FP64) for mesh in ("tp4+sp", "dp2xtp4+2d", "tp8+2.5d", "tp8+3d")),
    Case("pp2xtp4+2d+ckpt", model={**EVERYTHING, "num_classes": 7}),
    Case("tp2", model=ODD),
    # precision
    Case("dp2xfsdp2", check={"precision": "fp16", "reduce_dtype": "fp16"}),
    Case("tp2xdp2", {"microbatches": 2}, check={"precision": "fp8", "train__fp8_min_features": 97}),  # all but proj
    # the loss, and kernels of the optimizer
    Case("tp2xfsdp2+sp", check={"optimizer": "foreach", "task__options": {"bce": True, "bce_positive_weight": 3.0}}),
    Case(
        "pp2xdp2",
        {"microbatch_size": 2},
        model={"num_classes": 5},
        check={"task__options": {"class_weights": [0.5, 1, 2, 0, 1.5]}},
    ),
    # tensor modes: +sp also splits the images of a micro-batch over tp
    Case("tp3xfsdp2+sp", batch=36, check=FP64),
    Case("tp4+2d", model={"norm_eps": 0.1}, check=FP64),
    Case("tp8+3d", {"microbatches": 2}, model=ODD, check=FP64),
    # zero-bubble and V-shaped schedules
    Case("pp2", ZERO_BUBBLE),
    Case("pp2", DUALPIPEV, check=FP64),
    Case("pp2xtp2", ZBV, model=EVERYTHING),
    Case("pp2", {**ZBV, "split": (1, 2, 2, 1)}, model={"depth": 6}),
    # memory
    Case("fsdp2+offload"),
    # micro-batches of one image a rank
    Case("tp4+2d", {"microbatches": 4}, model=EVERYTHING, batch=8, check=FP64),
    # timing of the communication
    Case("pp2xfsdp2", check={"communication": Communication(reshard_after_forward=True)}),
    Case(
        "pp1: 0-1=dp2, *=fsdp2",
        {"microbatches": 2},
        check={"communication": Communication(bucket_cap_mb=0.5, prefetch=2, reduce_every_microbatch=True)},
    ),
    # layer by layer
    Case("pp1: embed=tp8+3d, 0=tp8+2.5d, 1=dp2xtp4+2d, *=fsdp4xtp2+sp", check=GRADIENTS),
    Case("pp1: 0=tp4+2d, 1=tp4+sp, 2=tp4, *=fsdp2xdp2", model=EVERYTHING, check=FP64),
    # Partial gradients over the same ranks: of two meshes, and of layers with fully_shard and without it.
    Case("pp1: 0-1=dp2xfsdp2xtp2+sp, *=fsdp4xtp2+sp", check=FP64),
    Case("pp1: 0-1=tp2xfsdp2+sp, *=tp2xdp2+sp", check=FP64),
    Case("pp1: embed=dp6, 0=tp3xdp2, 1=dp2xtp3, 2=tp2xfsdp3, *=fsdp6", batch=36, check=FP64),
    Case("pp2: 0-1=tp2, *=dp2+zero1", model=EVERYTHING, check=FP64),
    Case("pp2: 0=tp2, 1=dp2, 2=tp2+sp, *=fsdp2", ZBV, check=FP64),
    Case("pp2: 0=dp2xfsdp2, head=tp4, *=tp4+2d+ckpt", {"schedule": "gpipe"}),
    Case("pp3: 0=dp2, 1-2=tp2, *=fsdp2", {"split": (1, 2, 1)}, batch=24),
    Case("pp1: 0-1=dp2+ckpt, 2=dp2+ckpt.selective, *=dp2+zero2", {"microbatches": 2}),
    Case("pp1: embed=dp2+offload, 0-1=fsdp2+offload, *=dp2"),
)


TINY_SWIN: Mapping[str, Any] = {
    "patch_size": 2,
    "image_size": 16,  # grids of 8, 4 and 2 tokens: windows are shifted in the first two stages
    "window_size": 2,
    "embed_dim": 24,
    "depths": (2, 2, 2),
    "num_heads": (12, 12, 24),
    "mlp_ratio": 2.0,
    "num_classes": 5,
    "drop_path": 0.1,
}
"""Options of the tiny Swin Transformer. Degrees of 2, 3 and 4 divide the numbers of every stage."""
DEEP = {"depths": (3, 2, 3)}
"""Eight blocks, for four stages."""
UNEVEN = {"num_heads": (3, 6, 12), "embed_dim": 12}
"""Heads of which 3 are in the first stage, as swin_tiny has: tp2 fits from the second stage on."""
SGD = {"optimizer__name": "sgd"}
"""Adam moves an element by the sign of its gradient, and a tiny norm has elements whose gradient is only rounding."""


def _of(family: str) -> Callable[..., Case]:
    return partial(Case, family=family)


_swin = _of("Swin")
SWIN_CASES = (
    _swin("dp1", {"microbatches": 4}, check=FP64),
    _swin("pp4", model=DEEP),
    _swin("tp9+2d", batch=36, check=GRADIENTS),
    _swin("tp4+2d", {"microbatches": 2}, model={"drop_path": 0.4}),
    _swin("pp2", ZBV, model={"drop_path": 0.3}, check=FP64),
    # stages of any size
    _swin("pp2", {"split": "balanced"}, model={"depths": (1, 2, 4)}, check=FP64),
    _swin("pp2", {**INTERLEAVED, "split": (1, 2, 1, 2)}),
    # checkpointing, precision
    _swin("dp2+ckpt", check=FP64),
    _swin("tp2+ckpt.selective", check=FP64),
    _swin("dp1", check={"precision": "bf16", **SGD}),
    _swin("tp2xfsdp2+sp", check={"precision": "fp16"}),
    # layer by layer: names, numbers and both
    _swin("pp1: stage1=dp2, *=tp2", model=UNEVEN, check=FP64),
    _swin("pp1: embed=dp4, 0=tp2xdp2, 1=fsdp4, stage2=tp4, *=dp4+zero2", check=FP64),
    _swin("pp2: stage1=tp2, stage3=tp2+sp, *=dp2+zero1", INTERLEAVED, check=FP64),
    _swin("pp1: stage1=tp8+3d, stage2=tp8+2.5d, *=dp2xtp4+2d", check=GRADIENTS),
)


def _modern(parts: str, mesh: str, plan: dict[str, Any] | None = None, **options: Any) -> Case:
    return Case(mesh, plan or {}, check=GRADIENTS, family="modern ViT", parts=parts, **options)


TENSOR_MODES = ("tp2", "tp2+sp", "tp4+2d", "tp8+2.5d", "tp8+3d")
"""Every tensor mode."""
MODERN_CASES = (
    *(
        _modern(parts, mesh)
        for parts in ("dinov3_qkvb", "eva02_clip", "siglip2", "vit5", "vit_22b")
        for mesh in TENSOR_MODES
    ),
    *(_modern("parallel", mesh) for mesh in ("tp3", "tp2+sp+ckpt", "tp4+2d+ckpt", "tp8+3d+ckpt")),
    _modern("dinov3_plus", "tp4+sp", {"microbatches": 2}),
    _modern("fc_norm", "tp2+sp"),
    _modern("inner norms", "tp3+sp", batch=12),
    _modern("rms", "tp4+2d"),
    _modern("deit3", "pp3", batch=12),
    _modern("dinov2_giant_reg4", "pp2xtp2xdp2"),
    _modern("eva02_base", "pp2xtp2xfsdp2"),
    _modern("siglip_reg", "pp3xdp2", batch=12),
    _modern("siglip", "tp2xfsdp2+sp+ckpt"),
    _modern("vit5", "pp2", ZBV, model={"depth": 4}),
    _modern("vit_22b", "dp2+zero2", {"microbatches": 2}),
    _modern("eva02_tiny", "fsdp2+ckpt.selective"),
    _modern("dinov3", "pp2: 0=tp2, *=fsdp2"),
    _modern("eva02_clip", "pp2: 0=tp2+sp, 1=dp2, head=dp2, *=fsdp2+ckpt"),
    _modern("siglip2", "pp1: head=tp2, *=dp2"),
)


def _updated(mesh: str, name: str, **settings: Any) -> Case:
    decayed = {"optimizer__layer_decay": 0.5, "optimizer__weight_decay": 0.05, **settings}
    return Case(mesh, check={**FP64, "optimizer__name": name, "optimizer__lr": RATES[name], **decayed}, batch=24)


RATES = {"adamw": 1e-3, "adam": 1e-3, "lion": 1e-3, "lamb": 1e-3, "lars": 1.0, "muon": 1e-3, "adafactor": 1e-2}
"""Learning rates of optimizers."""
UPDATED = (
    *(_updated("fsdp2", name) for name in ("adamw", "lamb", "lars", "muon", "adafactor")),
    _updated("pp2", "adam"),
    _updated("tp2", "lion"),
    # These need norms of complete parameters, their rows and columns, or complete matrices; fsdp3 has empty shards.
    *(_updated("fsdp3", name) for name in ("lamb", "lars", "muon", "adafactor")),
    *(_updated("tp4+2d", name) for name in ("lamb", "muon", "adafactor")),
    *(_updated("pp1: 0-1=tp2xfsdp2, *=fsdp4", name) for name in ("lars", "muon")),
    _updated("dp2+zero1", "muon"),
    _updated("fsdp2", "lars", optimizer__momentum=0.0),
    _updated("fsdp2", "lars", optimizer__nesterov=True),
    _updated("fsdp2", "muon", optimizer__nesterov=False, optimizer__adjust_lr_fn="original"),
    Case("fsdp2", check={"optimizer__name": "sgd", "optimizer__momentum": 0.9, "optimizer__nesterov": True}),
)
"""Plans with every optimizer."""
_mae, _bert, _t5 = _of("MAE"), _of("BERT"), _of("T5")
V1_1 = {"activation": "geglu_tanh", "tied": False}
"""Options of T5 1.1."""
OTHER_TASKS = (
    _mae("dp1", {"microbatches": 2}, check=FP64),
    _mae("tp2xdp2+sp", {"microbatches": 2}, check=FP64),
    _mae("fsdp2", check={**FP64, "task__options": {"norm_pix_loss": False}}),
    _mae("pp2", ZBV, check=FP64),
    _mae("pp1: 0-1=tp2, *=fsdp2", check=FP64),
    _mae("tp4+2d", check=GRADIENTS),
    _mae("tp8+3d", check=GRADIENTS),
    # The vocabulary is split with tp, and its embedding shared with the head or the decoder.
    _bert("dp1", {"microbatches": 2}, check=FP64),
    _bert("tp2+sp", check={"precision": "bf16", **SGD}),
    _bert("fsdp2xtp2+sp", {"microbatches": 2}, check=FP64),
    _bert("tp2+sp+ckpt.selective", check=FP64),
    _bert("pp2xtp2", ZBV, check=FP64),
    _bert("pp1: embed=tp2+sp+ckpt, head=tp2+sp+ckpt, 0=tp2, 1=fsdp2, *=dp2", check=FP64),
    _t5("tp2xfsdp2+sp", check=FP64),
    _t5("pp2xfsdp2", {"microbatches": 2}, check=FP64),
    _t5("pp1: embed=fsdp2, 0=tp2, 1=dp2, 2=fsdp2, 3=tp2+sp, 4=tp2+ckpt, *=fsdp2", check=FP64),
    _t5("tp2", model=V1_1, check={"precision": "fp16", **SGD}),
    _t5("pp2", DUALPIPEV, model={**V1_1, "depth": 1}, check=FP64),
)
"""Plans of models that learn from pixels or text."""
_tied, _table = _of("tied"), _of("relative")
BF16 = {"precision": "bf16"}
SHARING = (
    _tied("dp2", check=BF16),
    _tied("tp2xfsdp2+sp", check=FP64),
    _tied("pp1: embed=fsdp2, head=fsdp2, *=tp2", check=FP64),
    _tied("pp2", {"schedule": "gpipe"}, check={**FP64, "optimizer__name": "lamb"}),
    _tied("pp4", check={**FP64, "optimizer__layer_decay": 0.7}),
    _tied("pp2", INTERLEAVED, check=FP64),
    _tied("pp2xdp2", ZBV, check=BF16),
    _tied("pp2xfsdp2", DUALPIPEV, check=FP64),
    _tied("pp2", check={**FP64, "train__freeze": "1-2"}),
    _table("fsdp2", check={**BF16, "train__ema_decay": 0.9}),
    _table("tp2", check=FP64),
    _table("tp2xdp2+sp", check=BF16),
    _table("pp1: 0=tp2, 1=dp2, 2=tp2+sp, *=fsdp2", check=FP64),
    _table("pp2: 0=tp2, 1=dp2+zero2, 2=tp2+sp+ckpt, *=fsdp2+offload", check=FP64),
    _table("pp2xtp2", check={**FP64, "train__freeze": "embed"}),
    _table("pp2", ZBV, check=FP64),
)
"""Plans of models whose layers share a matrix, or a table of all blocks."""


def frozen(freeze: str, mesh: str, plan: dict[str, Any] | None = None, family: str = "frozen") -> Case:
    return Case(mesh, plan or {}, check={**FP64, "train__freeze": freeze}, family=family)


def lora(mesh: str, plan: dict[str, Any] | None = None, check: Mapping[str, Any] = FP64, **settings: Any) -> Case:
    lora = {f"lora__{name}": value for name, value in {"rank": 3, "alpha": 5, **settings}.items()}
    return Case(mesh, plan or {}, check={**check, **lora}, family="LoRA")


PROBE, LOWER, MIDDLE = "embed, *", "embed, 0-1", "1-2"
BITFIT, NORMS = "embed, *, !*.bias", "embed, 0, blocks.*, head, !blocks.[23].norm?.*"
PARTLY_TRAINED = (
    frozen(LOWER, "fsdp2+ckpt", {"microbatches": 2}),
    Case("dp2xfsdp2", check={"precision": "bf16", "train__freeze": LOWER, **SGD}, family="frozen"),
    frozen(MIDDLE, "tp2+ckpt.selective"),
    frozen(MIDDLE, "tp4+2d"),
    frozen(PROBE, "pp2xfsdp2", {"schedule": "gpipe"}),
    frozen(LOWER, "pp2", INTERLEAVED),
    frozen("embed, 0", "pp2", ZBV),
    frozen(LOWER, "pp2: embed=fsdp2, 0-1=tp2, 2=dp2+zero1, *=fsdp2"),
    frozen(NORMS, "tp2+sp"),
    frozen("*.weight", "tp2xdp2+zero1"),
    frozen("embed, *, !*.relative_position_bias_table, !*.bias", "tp2+sp", family="Swin"),
    lora("dp2+zero1", {"microbatches": 2}, targets=("qkv", "blocks.1.mlp.fc2")),
    lora("fsdp2+ckpt"),
    lora("tp2+sp", {"microbatches": 2}, train="head, *.bias, *.norm1.*"),
    lora("tp4+2d", check=GRADIENTS, train=""),
    lora("tp2+ckpt.selective"),
    lora("pp2", ZBV),
    lora("pp2: embed=fsdp2, 0-1=tp2+sp, 2=dp2+zero2, *=fsdp2"),
    lora("tp8+3d", check=GRADIENTS),
    replace(lora("tp2"), model={"parallel_blocks": True, "activation": "swiglu"}),
    Case("tp2+sp", check={**FP64, "lora__rank": 3, "lora__alpha": 5}, family="Swin"),
    _bert("tp2", check={**FP64, "lora__rank": 3, "lora__targets": ("qkv", "proj", "dense")}),
    _t5("tp2+sp", check={**FP64, "lora__rank": 3}),
)
"""Plans of models with frozen parameters or adapters."""
ALL = (*CASES, *UPDATED, *MODERN_CASES, *SWIN_CASES, *OTHER_TASKS, *SHARING, *PARTLY_TRAINED)


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


LONG = ("optimizer ", "check.optimizer__", "layerwise, pp3")
"""Features that `make test` leaves out, besides meshes of three axes."""


def every_day(case: Case) -> set[str]:
    """Return the family of the case and its features that `make test` has once."""
    return {case.family, *(f for f in case.features if f.count(" x ") < 2 and not f.startswith(LONG))}


QUICK = {str(case) for case in representatives(ALL, every_day)}
OF_LAYERS = {"tp", "+sp", "+2d", "+3d", "+ckpt", "+ckpt.selective", "zbvzerobubble"}
"""Features that a family's own layers take part in. The others are of code that all families share."""


def of_family(case: Case) -> set[tuple[str, str]]:
    """Return the features of the case that its family must be tested with."""
    return {(case.family, feature) for feature in case.features if feature in OF_LAYERS or "layerwise" in feature}


SLOW = {str(case) for case in (*representatives(ALL, of_family), *UPDATED)}


def tiers() -> list[Any]:
    """Return test parameters of all plans, small ones first, marked by the command that runs them.

    `make test` runs few plans that have nearly every feature at least once. `make test-slow` runs few more that have
    every optimizer, and with every family what its layers take part in. `make soak` runs the rest.
    """
    found = []
    for case in sorted(ALL, key=lambda case: case.ranks):
        name = str(case)
        marks = [] if name in QUICK else [pytest.mark.slow] if name in SLOW else [pytest.mark.soak]
        found.append(pytest.param(case, marks=marks, id=name))
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
def layerwise(draw: st.DrawFn, sizes: Sequence[int], degrees: Sequence[int], depth: int = 4) -> Case:
    """Draw a layerwise plan of one of the `sizes`, in ranks, and pipeline `degrees`, for a model of `depth` blocks."""
    ranks = draw(st.sampled_from(sizes))
    pp = draw(st.sampled_from([n for n in degrees if ranks % n == 0]))
    schedules = [{"schedule": "gpipe"}, {}, INTERLEAVED, ZERO_BUBBLE, ZBV, DUALPIPEV]
    plan = draw(st.sampled_from(schedules)) if pp > 1 else {"microbatches": draw(st.sampled_from([1, 2]))}
    bounds = sorted(draw(st.sets(st.integers(0, depth), min_size=2, max_size=4)))
    names = [f"{a}-{b - 1}" for a, b in pairwise(bounds)]
    names += draw(st.sets(st.sampled_from(["embed", "head"])).map(sorted))
    groups = [f"{name}={draw(strategies_of(ranks // pp))}" for name in (*names, "*")]
    return Case(f"pp{pp}: {', '.join(groups)}", plan)
