"""BERT and T5: logits and gradients of transformers, description, names, initial values, refusals."""

import json
import math
import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helpers.oracles import transformers
from helpers.text_models import (
    PADDED,
    V1_1,
    TextModel,
    bert,
    conversion,
    converted,
    exact_norm,
    filled,
    renamed_of,
    sample,
    t5,
    token_loss,
    twin,
)
from vitpar.errors import DataError, ModelError
from vitpar.models import FAMILIES, model_config
from vitpar.models.families import config_from_json, config_to_json
from vitpar.models.initial import initial_value, initialise
from vitpar.models.keyed_random import at_place, drop
from vitpar.models.layers import Layer, LayeredModel
from vitpar.models.t5.layers import buckets

CASES: dict[str, TextModel] = {
    "bert": bert(),
    "bert with fewer tokens than positions": bert(tokens=7, positions=20, token_types=3, depth=3),
    "bert with one head": bert(num_heads=1, mlp_hidden_dim=64, depth=1),
    "t5": t5(),
    "t5 v1.1": t5(**V1_1),
    "t5 of uneven depths": t5(depth=1, decoder_depth=3, tokens=5, decoder_tokens=21),
    "t5 with narrow heads": t5(num_heads=2, head_dim=4, num_buckets=32, max_distance=128, tokens=150),
    "t5 with gates, tied": t5(activation="geglu_tanh", depth=3, decoder_depth=1),
}
NO_HINTS = SimpleNamespace(image_size=None, patch_size=None, norm_eps=None, heads=None, fields={})


def side_inputs_of_twin(sides: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: side.long() for name, side in sides.items()}


def errors(config: TextModel, dtype: torch.dtype, *, masked: bool = True) -> dict[str, float]:
    """Return the largest errors of logits and of each gradient, relative to the largest element, by name."""
    theirs = twin(config).to(dtype)
    ours = filled(config, converted(dict(theirs.named_parameters()), config), dtype)
    x, sides, targets = sample(config, 6)
    if not masked:
        x, sides = x.clamp(min=1), {name: side for name, side in sides.items() if name == "decoder_input_ids"}
        sides = {name: side.clamp(min=1) for name, side in sides.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.models.t5.modeling_t5.T5LayerNorm, "forward", exact_norm)
        expected, logits = theirs(x, **side_inputs_of_twin(sides)).logits, ours(x, **sides)
    assert logits.shape == (6, *config.output_shape)
    valid = targets != PADDED
    found = {"logits": error(logits[valid], expected[valid])}
    for each in (logits, expected):
        token_loss(each, targets).backward()
    gradients = converted({name: p.grad for name, p in theirs.named_parameters()}, config)
    parameters = dict(ours.named_parameters())
    assert gradients.keys() == parameters.keys()
    for name, parameter in parameters.items():
        assert parameter.grad is not None and parameter.grad.any(), name
        found[name] = error(parameter.grad, gradients[name])
    return found


def error(ours: Tensor, theirs: Tensor) -> float:
    return (ours - theirs).abs().max().item() / max(1e-3, theirs.abs().max().item())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("masked", [True, False], ids=["padded", "complete"])
def test_logits_and_gradients_match_transformers_in_float64(case: str, masked: bool) -> None:
    found = errors(CASES[case], torch.float64, masked=masked)
    assert max(found.values()) <= 1e-10, found


@pytest.mark.parametrize("case", ["bert", "t5", "t5 v1.1"])
def test_logits_and_gradients_match_transformers_in_float32(case: str) -> None:
    found = errors(CASES[case], torch.float32)
    assert max(found.values()) <= 1e-4, found
