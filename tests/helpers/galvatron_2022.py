"""Galvatron's planner of 2022 on ViT-Huge-32 and 8 GPUs on PCIe, and vitpar's search under the same cost model.

Contains the table of plans that Galvatron printed, its cost model, and the profile behind it in Galvatron's files. The
figures are predictions of that cost model, not measurements. Sources: Miao et al., "Galvatron: Efficient Transformer
Training over Multiple GPUs Using Automatic Parallelism", VLDB 2023, and its published code of 2022. Times are in ms,
sizes in MB of 2**20 bytes. The time of a pipeline is that of its longest stage times the number of stages. Galvatron's
search rounds the memory of each layer up to whole MB, so that fewer layers fit than without rounding. Plans are
compared under that rounding: without it the best plan for 8 GB is 0.5 % faster.
"""

import json
import math
from pathlib import Path

import numpy as np

from vitpar.models import ViTConfig, model_config
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.memory import Memory
from vitpar.planner.cost.price import Price
from vitpar.planner.profile.galvatron import import_hardware, import_model
from vitpar.planner.search.best import ROUNDING, Search
from vitpar.planner.search.bounds import Machine, PlanOutline
from vitpar.planner.search.options import Choices, Load, Option
from vitpar.planner.search.ranking import SearchEffort
from vitpar.planner.search.space import Space
from vitpar.strategy import Plan, Strategy

GPUS, DEPTH, MB = 8, 32, 2**20
TABLE = {
    8: (37.7, 56, "pp1: embed=tp2xdp4, 0=dp4xtp2, 1-31=fsdp4xtp2, head=fsdp4xtp2"),
    12: (53.3, 72, "pp2xdp4"),
    16: (67.5, 160, "pp1: embed=dp8, 0-1=dp8, 2-31=fsdp8, head=fsdp8"),
    20: (75.4, 152, "pp1: embed=dp8, 0-19=dp8, 20-31=fsdp8, head=fsdp8"),
}
"""Galvatron's best plan by GB of a GPU: images/s, batch size, plan."""
COLUMNS = {"dp8": (0.0, 14.5, 47.1, 69.5), "fsdp8": (34.2, 52.8, 66.6, 73.1), "pp8": (22.5, 22.5, 22.5, 22.5)}
"""Images/s of uniform plans at their best batch size, for 8, 12, 16 and 20 GB; 0 if no batch fits."""
PARAMETERS = 76.98  # MB of a layer's parameters in fp32
FORWARD = 0.75  # ms of a layer's forward per image
CONTEXT = 1024  # MB of a GPU that the model cannot use
SAVED = {1: 20.27, 2: 12.12, 4: 7.97, 8: 5.93}  # MB of a layer's saved activations per image, by tp degree
OVERLAP = 1.3
BATCHES = range(8, 257, 8)
COMMUNICATION = {
    **{(1, 8, 1): 0.21531, (1, 4, 0): 0.22014, (1, 4, 1): 0.22652, (1, 2, 0): 0.27161, (1, 2, 1): 0.27799},
    **{(2, 4, 1): 0.23075, (2, 2, 0): 0.22415, (2, 2, 1): 0.27520, (4, 2, 1): 0.26491},
}
"""ms per MB of a message, by (pipeline degree, ranks, 1 if the ranks are neighbours)."""


def vit_huge_32() -> ViTConfig:
    """Return the model: 196 tokens of width 1280, 32 blocks."""
    return model_config(
        "vit_custom",
        image_size=224,
        patch_size=16,
        embed_dim=1280,
        depth=DEPTH,
        num_heads=16,
        pool="avg",
        num_classes=1000,
    )


def known(pp: int, strategy: Strategy) -> bool:
    """Return whether the cost model can price `strategy`: dp or fsdp outside tp, tp over neighbours."""
    roles = [axis.role for axis in strategy.axes]
    data = [role for role in roles if role != "tp"]
    return len(data) <= 1 and roles == [*data, *(["tp"] if strategy.has("tp") else [])] and pp in (1, 2, 4, 8)


def layer_ms(pp: int, strategy: Strategy, batch_size: int) -> float:
    """Return the milliseconds of a layer for all images of a step, in a pipeline of `pp` stages."""
    tp, data = strategy.degree("tp"), strategy.degree("dp") * strategy.degree("fsdp")
    images = batch_size / data
    forward, tensor, message, rate = FORWARD * images / tp, 0.0, 0.0, 0.0
    if tp > 1:
        tensor = 2 * (tp - 1) / tp * (images * 196 * 1280 * 16 / MB) * COMMUNICATION[pp, tp, 1]
    if data > 1:
        message, rate = 2 * (data - 1) / data * PARAMETERS / tp, COMMUNICATION[pp, data, int(tp == 1)]
    gathering = message * rate / 2 if strategy.has("fsdp") else 0.0
    if pp == 1:
        beside = 0.5 if tp == 4 and data > 1 else 1.0
        hidden = _overlapped(message, rate, beside * 2 * forward)
        return 1.1 * (forward + hidden + (1 - beside) * 2 * forward + tensor + gathering)
    microbatches = 1 if images == 8 else 2
    computed = (3 * forward + tensor) * (pp + microbatches - 1) / (pp * microbatches)
    parts = pp if tp == 1 else 1
    added = parts * (_overlapped(message / parts, rate, 2 * forward / parts) - 2 * forward / parts)
    return 1.1 * (computed + added + gathering)


def _overlapped(message: float, rate: float, backward: float) -> float:
    """Return the time of a message overlapped with a backward: both take longer while they overlap."""
    sends, computes = message * rate * OVERLAP, backward * OVERLAP
    if sends > computes:
        return computes + (message - computes / (rate * OVERLAP)) * rate
    return sends + backward - sends / OVERLAP


def layer_mb(strategy: Strategy, batch_size: int) -> int:
    """Return the memory of a layer in MB, rounded up."""
    tp, data = strategy.degree("tp"), strategy.degree("dp") * strategy.degree("fsdp")
    part = 1 / data + 0.025 if strategy.has("fsdp") else 1.0
    return math.ceil(4 * PARAMETERS / tp * part + SAVED[tp] * batch_size / data)


def other_mb(strategy: Strategy, batch_size: int) -> int:
    """Return the memory outside the layers in MB, rounded up.

    strategy: that of the first layer.
    """
    images = batch_size / strategy.degree("dp") / strategy.degree("fsdp")
    return math.ceil(45.56 + 13 * images / strategy.degree("tp") + CONTEXT)


def its_space(config: ViTConfig) -> Space:
    """Return the plans that Galvatron searched: no activation checkpointing, no tensor modes other than 1D."""
    return Space(config, GPUS, tuple(BATCHES), flags=(), tensors=tuple(f"tp{tp}" for tp in SAVED))


class _Space(Space):
    """Plans that the cost model can price. It fixes the number of micro-batches itself."""

    def microbatches(self, pipeline: Plan, batch_size: int) -> list[int]:
        return super().microbatches(pipeline, batch_size)[:1]

    def strategies(self, size: int) -> tuple[Strategy, ...]:
        return tuple(s for s in super().strategies(size) if known(self.ranks // size, s))


class UnderItsModel(Search):
    """vitpar's search with the prices of Galvatron's cost model."""

    def __init__(self, costs: LayerCosts) -> None:
        space = _Space(costs.config, GPUS, tuple(BATCHES), flags=(), schedules=("gpipe",))
        super().__init__(space, costs, effort=SearchEffort(simpler=0.0))

    def options(self, outline: PlanOutline) -> Choices:
        pp, batch = outline.pipeline.pipeline_degree, outline.batch_size
        found = []
        for strategy in self.space.strategies(GPUS // pp):
            if batch % (strategy.degree("dp") * strategy.degree("fsdp")) == 0:
                block = Load(once=pp * layer_ms(pp, strategy, batch) / 1e3, kept=layer_mb(strategy, batch) * MB)
                loads = {"embed": Load(kept=other_mb(strategy, batch) * MB), "block": block, "head": Load()}
                found.append(Option(strategy, loads))
        return Choices(tuple(found), tuple(self.costs.config.kinds), (np.arange(len(found)),))

    def machine(self, outline: PlanOutline, budget: float) -> Machine:
        # The cost model counts memory outside the layers on every stage, vitpar's search only on the first.
        return Machine(lanes=GPUS, budget=budget * (1 + ROUNDING))

    def _ideal(self, outline: PlanOutline) -> float:
        return 0.0

    def _price(self, plan: Plan, batch_size: int) -> Price:
        return its_price(plan, batch_size)

    def memory_bytes(self, plan: Plan, batch_size: int) -> float:
        return self.price(plan, batch_size).memory_bytes


def its_price(plan: Plan, batch_size: int) -> Price:
    """Return the price of a plan under Galvatron's cost model."""
    pp = plan.pipeline_degree
    blocks = [plan.strategies(vit_huge_32().layer_names)[f"blocks.{n}"] for n in range(DEPTH)]
    sizes = plan.split if isinstance(plan.split, tuple) else (DEPTH // pp,) * pp
    seconds, memory, start = 0.0, [], 0
    for size in sizes:
        stage, start = blocks[start : start + size], start + size
        seconds = max(seconds, pp * sum(layer_ms(pp, s, batch_size) for s in stage) / 1e3)
        taken = sum(layer_mb(s, batch_size) for s in stage) + other_mb(blocks[0], batch_size)
        memory.append(Memory(taken * MB, 0, 0, 0, 0, 0, 0))
    return Price(plan, batch_size, seconds, {}, tuple(memory), ())


def write_profiles(folder: Path) -> None:
    """Write the constants of the cost model in the file formats of today's Galvatron."""
    bandwidths = {f"allreduce_size_{n}_consec_{c}": 1 / ms for (pp, n, c), ms in COMMUNICATION.items() if pp == 1}
    places = {
        "model_states": {str(tp): 45.56 for tp in SAVED},
        "activation": {str(tp): 13.0 / tp for tp in SAVED},
    }
    nothing = {"model_states": {"1": 0.0}, "activation": {"1": 0.0}}
    layer = {"parameter_size": PARAMETERS, "tp_activation_per_bsz_dict": {str(tp): mb for tp, mb in SAVED.items()}}
    files = {
        "allreduce_bandwidth_1nodes_8gpus_per_node.json": bandwidths,
        "p2p_bandwidth_1nodes_8gpus_per_node.json": {f"pp_size_{n}": 1 / COMMUNICATION[4, 2, 1] for n in (2, 4, 8)},
        "overlap_coefficient.json": {"overlap_coe": OVERLAP},
        "computation_profiling_fp32_all.json": {
            "layertype_0_bsz8_seq196": FORWARD,
            "layertype_other_bsz8_seq196": 0.0,
        },
        "memory_profiling_fp32_all.json": {
            "layertype_0_sp": {"196": layer},
            "other_memory_pp_on_first_sp": {"196": places},
            "other_memory_pp_on_last_sp": {"196": nothing},
        },
    }
    for name, found in files.items():
        (folder / name).write_text(json.dumps(found))


def imported(folder: Path) -> LayerCosts:
    """Return vitpar's costs for the same machine and model, from the files in `folder`."""
    config = vit_huge_32()
    hardware = import_hardware(folder, 1, GPUS, 24 * 10**9, "8 GPUs on PCIe")
    return LayerCosts(config, hardware, import_model(folder, config, "fp32"))
