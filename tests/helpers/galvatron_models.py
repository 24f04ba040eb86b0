"""Galvatron's constants for BERT, T5 and Swin: those of 2022 for 8 GPUs with 24 GB in fp32, and later profiles."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from helpers.galvatron_cost import MB, CostModel, LayerType
from vitpar.models import model_config
from vitpar.models.config import ModelConfig
from vitpar.strategy import Strategy


@cache
def bert_large() -> CostModel:
    saved = {1: 85.00833, 2: 47.00833, 4: 28.008125, 8: 18.54875}
    block = LayerType(48.05, saved, 1.45833333, activation=512 * 1024 * 4 / MB)
    return CostModel(model_config("bert_large"), {"block": block}, states=640, outside=300, chunks=_bert_chunks)


@cache
def bert_huge_32() -> CostModel:
    config = model_config("bert_custom", embed_dim=1280, depth=32, num_heads=16)
    saved = {1: 94.07, 2: 52.475, 4: 31.754375, 8: 21.61171875}
    block = LayerType(76.98, saved, 2.29166666, activation=512 * 1280 * 4 / MB)
    return CostModel(config, {"block": block}, states=790, outside=300, chunks=_bert_chunks)


@cache
def t5_large() -> CostModel:
    """Return the cost model of T5-Large, 24 + 24 layers. Its code adds 60 ms to 24 layers of plans with dp."""
    activation = 512 * 1024 * 4 / MB
    types = {
        "encoder": LayerType(48.01, {1: 91.003, 2: 54.004, 4: 32.785, 8: 22.8175}, 1.45833333, activation),
        "decoder": LayerType(64.012, {1: 157.755, 2: 90.756, 4: 56.384, 8: 39.117}, 2.70833333, activation, True),
    }
    return CostModel(model_config("t5_large"), types, states=900, outside=350, chunks=_t5_chunks, overhead=60 / 24)


@cache
def swin_huge_32() -> CostModel:
    return _swin(model_config("swin_huge_patch4_window7_224"))


@cache
def swin_huge_48() -> CostModel:
    return _swin(model_config("swin_huge48_patch4_window7_224"))


def _swin(config: ModelConfig) -> CostModel:
    constants = (
        (4.80, (72.584, 43.318, 29.716, 22.360), 1.2500),
        (18.82, (36.423, 21.330, 14.708, 11.237), 0.8875),
        (77.05, (18.317, 11.252, 7.561, 5.611), 0.8000),
        (302.22, (9.183, 5.076, 3.835, 2.802), 1.2250),
    )
    types = {}
    for number, (parameters, saved, forward) in enumerate(constants):
        activation = 3136 * 320 / 2**number * 4 / MB
        layer = LayerType(parameters, dict(zip((1, 2, 4, 8), saved, strict=True)), forward, activation)
        types |= {f"stage{number + 1}": layer} | ({f"merge{number + 1}": layer} if number else {})
    return CostModel(config, types, states=312, outside=70, chunks=_swin_chunks)


def _bert_chunks(samples: float, pp: int, strategy: Strategy) -> float:
    if strategy.degree("tp") > 1 and strategy.degree("dp") * strategy.degree("fsdp") == 1:
        return samples / 4
    return samples / 2 if samples < 6 else samples / 8 + 2


def _t5_chunks(samples: float, pp: int, strategy: Strategy) -> float:
    return 1 if samples == 2 else 3 if pp == 8 else 2


def _swin_chunks(samples: float, pp: int, strategy: Strategy) -> float:
    return 1 + (samples > 8) + (samples >= 32) + (samples > 96)


def write_shipped_profile(folder: Path, config: ModelConfig) -> None:
    """Write the profile of a model that Galvatron 2.4.0 ships for GPUs with 40 GB, in bf16."""
    tokens, batch, times, other, types, first, last = _SHIPPED[config.name]
    every = f"[{','.join(map(str, tokens))}]" if len(tokens) > 1 else str(tokens[0])
    computed = {f"layertype_{n}_bsz{batch}_seq{seq}": times[n] for n, seq in enumerate(tokens)}
    computed[f"layertype_other_bsz{batch}_seq{every}"] = other
    memory = {
        f"layertype_{n}": {
            str(seq): {
                "tp_activation_per_bsz_dict": dict(zip(("checkpoint", "1", "2", "4", "8"), types[n], strict=True))
            }
        }
        for n, seq in enumerate(tokens)
    }
    ends = {
        f"other_memory_pp_on_{place}": {every: {"activation": {str(2**n): mb for n, mb in enumerate(activation)}}}
        for place, activation in (("first", first), ("last", last))
    }
    (folder / "computation_profiling_bf16.json").write_text(json.dumps(computed))
    (folder / "memory_profiling_bf16.json").write_text(json.dumps({**memory, **ends}))


_SHIPPED: dict[str, Any] = {
    "bert_large": (
        (512,), 1, (1.77373,), 3.51520, ((1.25, 36.8555, 18.4277, 9.21387, 4.60693),),
        (17.9065, 8.95325, 4.47662, 2.23831), (74.5149, 37.2574, 18.6287, 9.31436),
    ),
    "t5_3b": (
        (512, 512), 8, (0.44764, 0.62779), 0.80106,
        ((1.0, 52.4619, 27.9673, 14.2551, 7.22083), (1.0, 71.6387, 39.2285, 19.7432, 9.98486)),
        (11.5715, 5.79016, 9.02551, 4.51276), (37.3661, 18.6838, 9.55927, 4.77963),
    ),
    "swin_huge48_patch4_window7_224": (
        (3136, 784, 196, 49), 12, (0.23355, 0.18416, 0.23631, 0.20706), 0.0,
        (
            (1.91406, 33.2383, 20.6855, 14.3246, 11.7643), (0.85254, 15.3267, 9.94727, 6.89355, 5.7204),
            (0.99219, 6.29443, 4.88184, 3.62268, 2.73895), (0.23926, 2.5127, 2.64966, 1.22986, 1.56903),
        ),
        (34.1831, 19.4924, 13.5578), (2.5166, 1.69104, 4.8208),
    ),
}  # fmt: skip
"""Tokens, batch size, ms per sample of layer types and of the rest, MB of activations per sample. Those of layer types
are with checkpointing and by tp degree, then come those of the first and the last stage by tp degree."""
