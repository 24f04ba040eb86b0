"""Weights of BERT and T5 from transformers and back, as files."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.converted import converted, filled, found_in
from helpers.foreign_weights import saved
from helpers.oracles import transformers
from helpers.text_models import V1_1, TextModel, bert, exact_norm, sample, t5, twin
from helpers.written_weights import weights_of
from vitpar.errors import DataError
from vitpar.models import model_config
from vitpar.models.initial import initialise
from vitpar.models.layers import LayeredModel
from vitpar.recipe import read_recipe
from vitpar.training.begin import opened_for
from vitpar.weights.exporting import export_onnx, export_weights
from vitpar.weights.folder import Weights, open_weights
from vitpar.weights.foreign import FAMILIES
from vitpar.weights.importing import import_weights, model_section

LONG = {"tokens": 512}  # transformers' files do not say how many tokens a T5 is trained with
MODELS: dict[str, TextModel] = {
    "bert": bert(tokens=20, token_types=3, norm_eps=1e-3, dropout=0.2),
    "t5": t5(**LONG, decoder_tokens=512, depth=3, decoder_depth=1, norm_eps=1e-3, dropout=0.2),
    "t5 v1.1": t5(**V1_1, **LONG, decoder_tokens=512, max_distance=30),
}


@pytest.mark.parametrize(
    ("config", "zipped"), [(bert(vocab_size=4000), True), (t5(vocab_size=4000), False)], ids=["bert", "t5, legacy"]
)
def test_pickles_with_tied_tensors_compute_the_same(
    config: TextModel, zipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Import files that would be larger if each name of the word embeddings had a tensor."""
    monkeypatch.setattr(transformers.models.t5.modeling_t5.T5LayerNorm, "forward", exact_norm)
    theirs = twin(config)
    theirs.config.save_pretrained(tmp_path / "theirs")
    state = {**theirs.state_dict(), "position_ids": torch.arange(9)}  # a table of integers, which older files have
    file = tmp_path / "theirs/pytorch_model.bin"
    torch.save(state, file, _use_new_zipfile_serialization=zipped)
    assert sum(tensor.nbytes for tensor in state.values()) > 1.5 * file.stat().st_size
    import_weights(tmp_path / "theirs", tmp_path / "ours")
    found = open_weights(tmp_path / "ours")
    ours = filled(config, {key: found.read(key) for key in config.shapes}, torch.float64)
    x, sides, _ = sample(config, 3)
    valid = sides.get("decoder_attention_mask", sides["attention_mask"])
    with torch.no_grad():
        expected = theirs.double()(x, **{key: side.long() for key, side in sides.items()}).logits
        torch.testing.assert_close(ours(x, **sides)[valid], expected[valid], atol=1e-10, rtol=1e-10)


def twins_folder(name: str, folder: Path) -> tuple[nn.Module, Path]:
    """Return transformers' model, and a folder that it wrote."""
    model = twin(MODELS[name])
    model.save_pretrained(folder)
    return model, folder


@pytest.mark.parametrize("name", MODELS)
def test_files_of_transformers_are_imported(name: str, tmp_path: Path) -> None:
    config = MODELS[name]
    theirs, folder = twins_folder(name, tmp_path / "theirs")
    done = import_weights(folder, tmp_path / "ours")
    assert done.format == "transformers" and done.config == replace(config, init=type(config).init)
    found = open_weights(tmp_path / "ours")
    expected = converted(dict(theirs.named_parameters()), config)
    assert expected.keys() == config.shapes.keys()
    assert all(torch.equal(found.read(key), tensor) for key, tensor in expected.items())
    recipe = read_recipe(tmp_path / "ours" / "recipe.toml", {"data.path": "none"})
    assert replace(recipe.config(10), name=config.name) == done.config
    # The data decide on the length of samples, but not on the vocabulary.
    assert model_section(model_config("t5_small"))["options"] == {"vocab_size": 32128}
    opened_for(tmp_path / "ours", replace(done.config, tokens=7, **({} if name == "bert" else {"decoder_tokens": 5})))
    again = import_weights(tmp_path / "ours", tmp_path / "again")
    assert (again.format, again.config) == ("vitpar", done.config)


@pytest.mark.parametrize("name", MODELS)
def test_exported_models_compute_the_same(name: str, tmp_path: Path) -> None:
    config = MODELS[name]
    weights, model = written(config, tmp_path / "ours")
    export_weights(weights, tmp_path / "theirs", "transformers", shard_bytes=10**9)
    kind = transformers.BertForMaskedLM if name == "bert" else transformers.T5ForConditionalGeneration
    theirs, report = kind.from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    settings = twin(config).config.to_dict()
    settings |= {key: theirs.config.to_dict()[key] for key in ("architectures", "dtype", "_name_or_path")}
    assert theirs.config.to_dict() == settings
    x, sides, _ = sample(config, 3)
    valid = sides.get("decoder_attention_mask", sides["attention_mask"])
    with torch.no_grad():
        expected = theirs.eval()(x, **{key: side.long() for key, side in sides.items()}).logits
        torch.testing.assert_close(model(x, **sides)[valid], expected[valid], atol=2e-4, rtol=1e-4)


def written(config: TextModel, folder: Path) -> tuple[Weights, LayeredModel]:
    """Return a folder of weights, and the model that has them."""
    model = LayeredModel(config).eval()
    model.tie()
    initialise(model, 0, config)
    return weights_of(model, config, folder), model


def test_older_files_of_bert_are_imported(tmp_path: Path) -> None:
    config = MODELS["bert"]
    theirs, folder = twins_folder("bert", tmp_path / "theirs")
    state = {
        re.sub(r"LayerNorm\.(weight|bias)", lambda found: f"LayerNorm.{OLD[found[1]]}", key): tensor.clone()
        for key, tensor in theirs.state_dict().items()
        if key != "cls.predictions.bias"
    }
    state |= {"bert.embeddings.position_ids": torch.arange(20)[None]}
    state |= {"bert.pooler.dense.weight": torch.ones(16, 16), "cls.seq_relationship.bias": torch.ones(2)}
    done = import_weights(
        saved(tmp_path / "old", state, json.loads((folder / "config.json").read_text())), tmp_path / "a"
    )
    assert done.config == replace(config, init="bert")
    assert done.notes == ["the pooler, next-sentence prediction and second copies of shared tensors are left out"]
    import_weights(folder, tmp_path / "b")
    old, new = open_weights(tmp_path / "a"), open_weights(tmp_path / "b")
    assert all(torch.equal(old.read(key), new.read(key)) for key in config.shapes)


OLD = {"weight": "gamma", "bias": "beta"}


def test_numbers_that_no_tensor_shows_come_from_the_name() -> None:
    for config in (bert(embed_dim=128, num_heads=2), t5(**V1_1)):
        state = dict(twin(config).named_parameters())
        found: Any = FAMILIES[config.FAMILY].infer_config("x", found_in(state, config), {})
        assert (found.num_heads, found.tokens) == (config.num_heads, 512 if isinstance(config, type(t5())) else 12)
    small = bert(embed_dim=48, num_heads=2)
    state = dict(twin(small).named_parameters())
    with pytest.raises(DataError, match=r"'x' is not a bert_base: its embed_dim is 48 instead of 768: name another"):
        FAMILIES["bert"].infer_config("x", found_in(state, small), {}, "bert_base")
    with pytest.raises(DataError, match=r"'x' is a T5, not a bert_base: name another model, or omit --model"):
        state = dict(twin(t5()).named_parameters())
        FAMILIES["t5"].infer_config("x", found_in(state, t5()), {}, "bert_base")


def test_other_formats_and_options_of_images_are_refused(tmp_path: Path) -> None:
    _, folder = twins_folder("bert", tmp_path / "bert")
    with pytest.raises(DataError, match="is a model of text: leave --classes and --image-size out"):
        import_weights(folder, tmp_path / "imported", classes=3)
    weights, _ = written(bert(), tmp_path / "ours")
    with pytest.raises(DataError, match="bert_custom can be exported to transformers, but not to timm: use --format"):
        export_weights(weights, tmp_path / "theirs", "timm", shard_bytes=10**9)
    with pytest.raises(DataError, match="bert_custom takes token ids, but ONNX is for models of images: use another"):
        export_onnx(weights, tmp_path / "onnx")


@pytest.mark.parametrize(("name", "shape"), [("bert", ()), ("t5", (7, 5)), ("t5 v1.1", ())], ids=str)
def test_tensors_of_any_shape_are_refused(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    """Give every second tensor another shape, and leave out the others, one at a time."""
    theirs, folder = twins_folder(name, tmp_path / "theirs")
    config = json.loads((folder / "config.json").read_text())
    state = {key: tensor.clone() for key, tensor in theirs.named_parameters()}
    for number, key in enumerate(key for key in state if not re.search(r"\.[1-9]\d*\.", key.replace(".layer.", "."))):
        changed = {**state, key: torch.ones(shape)} if number % 2 else {k: t for k, t in state.items() if k != key}
        if name == "t5 v1.1" and key == "lm_head.weight" and key not in changed:
            continue  # the word embeddings stand in for it
        source = saved(tmp_path / f"source{number}", changed, config)
        with pytest.raises(DataError):
            import_weights(source, tmp_path / f"ours{number}")
