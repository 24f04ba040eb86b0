"""Plans that Galvatron's planner of 2022 printed for ViT-Huge-32 on 8 GPUs on PCIe, and its profile as files of today.

The figures are predictions of its cost model (`helpers.galvatron_cost`), not measurements. Without rounding the memory
of each layer, the best plan for 8 GB is 0.5 % faster.
"""

import json
from pathlib import Path

from helpers.galvatron_cost import COMMUNICATION, GPUS, MB, OVERLAP, CostModel, LayerType
from vitpar.models import ViTConfig, model_config
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.profile.galvatron import import_hardware, import_model
from vitpar.strategy import Strategy

DEPTH = 32
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
SAVED = {1: 20.27, 2: 12.12, 4: 7.97, 8: 5.93}  # MB of a layer's saved activations per image, by tp degree
BATCHES = range(8, 257, 8)


def vit_huge_32() -> ViTConfig:
    """Return the model: 196 tokens of width 1280, 32 blocks."""
    return model_config(
        "vit_custom",
        **{"image_size": 224, "patch_size": 16, "embed_dim": 1280, "depth": DEPTH, "num_heads": 16, "pool": "avg"},
        **{"num_classes": 1000},
    )


def _chunks(samples: float, pp: int, strategy: Strategy) -> float:
    return 1 if samples == 8 else 2


def vit_cost_model() -> CostModel:
    """Return the cost model of ViT-Huge-32."""
    block = LayerType(PARAMETERS, SAVED, FORWARD, activation=196 * 1280 * 4 / MB)
    return CostModel(vit_huge_32(), {"block": block}, states=45.56, outside=13.0, chunks=_chunks)


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
    hardware = import_hardware(folder, 1, GPUS, 24 * 10**9)
    return LayerCosts(config, hardware, import_model(folder, config, "fp32"))
