"""BERT and T5: logits and gradients of transformers, description, names, initial values, refusals."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.converted import converted, error, filled, gradient_errors
from helpers.oracles import transformers
from helpers.text_models import (
    PADDED,
    V1_1,
    TextModel,
    bert,
    exact_norm,
    sample,
    t5,
    token_loss,
    twin,
)
from vitpar.errors import ModelError
from vitpar.models import FAMILIES, initial, model_config, text_layers
from vitpar.models.derived import with_frozen
from vitpar.models.families import config_to_json
from vitpar.models.initial import initial_value
from vitpar.models.keyed_random import at_place, drop
from vitpar.models.text_layers import Embedding

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
    assert all(parameter.grad.any() for parameter in ours.parameters())  # type: ignore[union-attr]
    return found | gradient_errors(ours, theirs)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("masked", [True, False], ids=["padded", "complete"])
def test_logits_and_gradients_match_transformers_in_float64(case: str, masked: bool) -> None:
    found = errors(CASES[case], torch.float64, masked=masked)
    assert max(found.values()) <= 1e-10, found


@pytest.mark.parametrize("case", ["bert", "t5", "t5 v1.1"])
def test_padding_does_not_influence_what_is_valid(case: str) -> None:
    config = CASES[case]
    model = filled(config, dtype=torch.float64)
    x, sides, _ = sample(config, 6)
    other = dict(sides)
    pad, ids = ~sides["attention_mask"], torch.randint(0, config.vocab_size, x.shape)
    valid = sides.get("decoder_attention_mask", sides["attention_mask"])
    if "decoder_input_ids" in sides:
        other["decoder_input_ids"] = torch.where(valid, sides["decoder_input_ids"], 3)
    else:
        other["token_type_ids"] = torch.where(pad, 1 - sides["token_type_ids"], sides["token_type_ids"])
    logits, changed = model(x, **sides), model(torch.where(pad, ids, x), **other)
    assert pad.any() and not torch.equal(logits, changed)
    torch.testing.assert_close(logits[valid], changed[valid], atol=0, rtol=1e-13)
    ints = {name: side.int() if side.dtype is torch.bool else side for name, side in sides.items()}
    assert torch.equal(model(x, **ints), logits)
    empty = {name: torch.zeros_like(side) if "mask" in name else side for name, side in sides.items()}
    assert all(model.to(dtype)(x, **empty).isfinite().all() for dtype in (torch.float64, torch.bfloat16))


@pytest.mark.parametrize("case", ["bert", "t5"])
def test_dropout_depends_on_the_samples_keys(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"bert": bert(dropout=0.5), "t5": t5(dropout=0.5)}[case]
    model = filled(config).train()
    x, sides, _ = sample(config, 4)
    keys = torch.arange(1, 5) * 1_000_003
    logits = model(x, keys, **sides)
    assert config.stochastic and torch.equal(logits, model(x, keys, **sides))
    flipped = {name: side.flip(0) for name, side in sides.items()}
    torch.testing.assert_close(model(x.flip(0), keys.flip(0), **flipped).flip(0), logits)
    assert not torch.allclose(model(x, keys + 1, **sides), logits)
    model.eval()
    assert torch.equal(model(x, keys, **sides), model(x, **sides))
    block: Any = model.train().layers()["blocks.1"]
    tokens = torch.randn(4, config.tokens, config.embed_dim)
    places = [block.dropped(tokens, keys, use) for use in range(2)]
    expected = [drop(tokens, at_place(keys, torch.tensor(8 + use)), 0.5, whole_sample=False) for use in range(2)]
    assert all(map(torch.equal, places, expected)) and not torch.equal(*places)
    used: list[int] = []
    monkeypatch.setattr(
        text_layers, "at_place", lambda keys, place: (used.append(int(place)), at_place(keys, place))[1]
    )
    model(x, keys, **sides)
    assert len(used) == len(set(used)) > 2 * config.num_blocks, "no two places drop alike"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_embeddings_are_accurate_in_16_bits(dtype: torch.dtype) -> None:
    embedding = Embedding(4, 16).to(dtype)
    ids, gradient = torch.zeros(8, 512, dtype=torch.int64), torch.randn(8, 512, 16).add(0.5).to(dtype)
    embedding(ids).backward(gradient)
    assert embedding.weight.grad is not None and not embedding.weight.grad[1:].any()
    torch.testing.assert_close(embedding.weight.grad[0].double(), gradient.double().sum((0, 1)), rtol=0.004, atol=0)


NAMES = [*FAMILIES["bert"].PUBLISHED, *FAMILIES["t5"].PUBLISHED, "google-bert/bert-base-cased"]


@pytest.mark.parametrize("name", NAMES)
def test_number_of_parameters_matches_transformers(name: str) -> None:
    config = model_config(name)
    assert isinstance(config, TextModel)
    with torch.device("meta"):
        theirs = twin_on_meta(config)
    assert config.parameters == sum(p.numel() for p in theirs.parameters())


def twin_on_meta(config: TextModel) -> nn.Module:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("helpers.text_models.randomised", lambda model: model)
        return twin(config)


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("google/t5-v1_1-small", "t5_v1_1_small"),
        ("t5-3b", "t5_3b"),
        ("google-t5/t5-base", "t5_base"),
        ("t5_v1_1_3b", "t5_v1_1_xl"),
        ("bert-large-uncased", "bert_large"),
        ("google-bert/bert-base-uncased", "bert_base"),
    ],
)
def test_names_of_the_hub(name: str, same: str) -> None:
    given, usual = config_to_json(model_config(name, num_classes=7)), config_to_json(model_config(same))
    assert {**given, "name": same} == usual


def test_options_replace_sizes() -> None:
    small = model_config("t5_small", depth=2, tokens=64)
    assert isinstance(small, type(t5())) and (small.decoder_depth, small.decoder_tokens) == (2, 512)
    base = model_config("bert_base", embed_dim=128, num_heads=2, tokens=128)
    assert isinstance(base, type(bert())) and (base.mlp_hidden_dim, base.positions) == (512, 512)
    assert base.input.shape == (128,) and base.output_shape == (128, 30522) and base.num_classes == 30522


REFUSED: tuple[tuple[Callable[..., TextModel], dict[str, Any], str], ...] = (
    (bert, {"num_heads": 3}, "3 heads do not divide embed_dim 16 of bert_custom: change one of the two"),
    (bert, {"positions": 8}, "bert_custom has 12 tokens but 8 positions: use at least as many positions"),
    (bert, {"vocab_size": 0}, "vocab_size of bert_custom is 0: it must be from 1 to 1,000,000"),
    (bert, {"dropout": 1.0}, "dropout of bert_custom is 1.0"),
    (t5, {"num_buckets": 6}, "num_buckets of t5_custom is 6: it must be a multiple of 4"),
    (t5, {"max_distance": 4}, "max_distance of t5_custom is 4: it must be above half of num_buckets, which is 4"),
    (t5, {"activation": "gelu"}, "unknown activation 'gelu' of t5_custom (did you mean 'relu'?): use relu or "),
    (t5, {"decoder_depth": 0}, "decoder_depth of t5_custom is 0: it must be from 1 to"),
    (t5, {"tokens": 2**21}, "tokens of t5_custom is 2097152: it must be from 1 to"),
    (t5, {"pool": "cls"}, "unknown model option 'pool' of t5_custom: options are activation, "),
)


@pytest.mark.parametrize(
    ("model", "options", "message"), REFUSED, ids=[f"{row[0].__name__}-{row[1]}" for row in REFUSED]
)
def test_sizes_that_do_not_fit_are_refused(
    model: Callable[..., TextModel], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        model(**options)
    with pytest.raises(ModelError, match="t5_custom needs the model options depth, num_heads"):
        model_config("t5_custom", embed_dim=8)


@pytest.mark.parametrize("name", ["bert_base", "t5_small", "t5_v1_1_small"])
def test_initial_values_have_the_deviations_of_transformers(name: str) -> None:
    config = model_config(name, depth=1, vocab_size=2000, tokens=64, positions=64) if "bert" in name else None
    config = config or model_config(name, depth=1, vocab_size=2000, tokens=8, decoder_tokens=8)
    assert isinstance(config, TextModel)
    torch.manual_seed(0)
    theirs = twin_on_meta(config)
    if not getattr(config, "tied", True):
        theirs.lm_head.weight.data.normal_()  # upstream: transformers 5 initialises it as the embeddings'
    for name, value in converted(dict(theirs.named_parameters()), config).items():
        ours = initial_value(name, value.shape, 0, config)
        assert ours.mean().item() == pytest.approx(
            value.mean().item(), abs=6 * value.std().item() / math.sqrt(value.numel()) + 1e-9
        ), name
        if value.numel() > 1000 or not value.std():
            assert ours.std().item() == pytest.approx(value.std().item(), rel=0.03), name
        if name.endswith("attn.qkv.weight"):
            heads, d = config.num_heads, config.head_dim
            parts = [x.unflatten(0, (heads, 3, d)).transpose(0, 1).flatten(1).std(1) for x in (ours, value)]
            torch.testing.assert_close(*parts, rtol=0.03, atol=0)


def test_initial_values_do_not_depend_on_chunks_or_frozen_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    config, name = t5(init="t5"), "blocks.0.attn.qkv.weight"
    whole = initial_value(name, torch.Size(config.shape(name)), 0, config)
    assert torch.equal(
        initial_value(name, whole.shape, 0, with_frozen(config, frozenset({"blocks.1.norm1.weight"}))), whole
    )
    monkeypatch.setattr(initial, "CHUNK", 50)  # no multiple of a row
    torch.testing.assert_close(initial_value(name, whole.shape, 0, config), whole)
