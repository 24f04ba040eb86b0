"""Files of peft: written for and read from timm and transformers, and merged on import."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from helpers.modern_vits import modern_config
from helpers.oracles import timm, transformers
from helpers.text_models import bert, t5
from helpers.written_weights import weights_of
from vitpar import model_config
from vitpar.errors import DataError
from vitpar.models.config import ModelConfig
from vitpar.models.initial import initialise
from vitpar.models.layers import LayeredModel
from vitpar.models.lora import LoRA, adapted
from vitpar.weights.adapters import SETTINGS, TENSORS, adapter_files, read_adapters
from vitpar.weights.exporting import Format, export_weights
from vitpar.weights.folder import open_weights, write_files
from vitpar.weights.importing import import_weights

RANK, ALPHA = 3, 5.0
SIZES = {"image_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 4, "num_classes": 5}
VIT = model_config("vit_custom", **SIZES, init="perturbed")
GATED = model_config("vit_custom", **SIZES, activation="swiglu", layer_scale=0.1, init="perturbed")
FC = ("head.fc.weight", "head.fc.bias")
HEAD = (*FC, "head.norm.weight", "head.norm.bias")


def with_adapters(config: ModelConfig, **options: Any) -> tuple[LoRA, dict[str, Tensor]]:
    """Return a model with adapters that are not zero, and its parameters."""
    made = adapted(config, RANK, ALPHA, **options).perturbed
    model = LayeredModel(made)
    initialise(model, 0, made)
    return made, {name: p.detach() for name, p in model.named_parameters()}


def filled(config: ModelConfig, parameters: Mapping[str, Tensor]) -> LayeredModel:
    model = LayeredModel(config)
    initialise(model, 0, config)
    model.load_state_dict(parameters)
    return model.eval()


def written(folder: Path, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Write files as peft does."""
    folder.mkdir()
    (folder / SETTINGS).write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, **settings}))
    save_file({f"base_model.model.{name}": tensor.contiguous() for name, tensor in tensors.items()}, folder / TENSORS)
    return folder


def in_files(name: str) -> str:
    """Return the name in files of a module of transformers 5, which renames what it loads."""
    name = name.replace("vit.layers.", "vit.encoder.layer.").replace("attention.o_proj", "attention.output.dense")
    for word in ("query", "key", "value"):
        name = name.replace(f"attention.{word[0]}_proj", f"attention.attention.{word}")
    if not name.startswith("vit."):
        return name
    return name.replace("mlp.fc1", "intermediate.dense").replace("mlp.fc2", "output.dense")


@pytest.mark.parametrize(
    ("config", "format_name"),
    [
        *((VIT, None), (VIT, "timm"), (VIT, "transformers"), (GATED, "timm"), (bert(), "transformers")),
        *((modern_config("dinov3"), "timm"), (modern_config("siglip2"), "timm"), (t5(), "transformers")),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_adapters_by_names_of_a_library_change_its_weights_as_ours(
    config: ModelConfig, format_name: Format | None, tmp_path: Path
) -> None:
    """Merged by peft's formula they are the export of merged weights, and what is read again is what was written."""
    made, parameters = with_adapters(config)
    trained = HEAD if "head.fc.weight" not in config.shared else ()
    write_files(tmp_path / "adapters", adapter_files(made, parameters.__getitem__, trained, format_name))
    again = read_adapters(tmp_path / "adapters", made)
    assert again.keys() == {*made.adapters, *trained}
    assert all(torch.equal(tensor, parameters[name]) for name, tensor in again.items())
    if format_name is None:
        return
    merged = {name: tensor.clone() for name, tensor in parameters.items() if name not in made.adapters}
    base = {name: tensor.clone() for name, tensor in merged.items()}
    for module in made.modules:
        a, b = (parameters[f"{module}.lora_{end}.weight"] for end in "AB")
        merged[f"{module}.weight"] += ALPHA / RANK * b @ a
    exported = {}
    for what, state in (("base", base), ("merged", merged)):
        model = filled(config, state)
        files, _ = export_weights(
            weights_of(model, config, tmp_path / f"{what} here"), tmp_path / what, format_name, shard_bytes=10**9
        )
        exported[what] = load_file(files[0])
    files = load_file(tmp_path / "adapters" / TENSORS)
    targets = json.loads((tmp_path / "adapters" / SETTINGS).read_text())["target_modules"]
    for name in targets:
        a, b = (files[f"base_model.model.{name}.lora_{end}.weight"] for end in "AB")
        exported["base"][f"{in_files(name)}.weight"] += ALPHA / RANK * b @ a
    assert exported["base"].keys() == exported["merged"].keys()
    for name, tensor in exported["merged"].items():
        torch.testing.assert_close(exported["base"][name], tensor, atol=1e-6, rtol=1e-6, msg=name)


PLAIN = "blocks.0.mlp.fc2"
A, B = torch.randn(RANK, 96), torch.randn(24, RANK)
QUERY, VALUE = (f"vit.encoder.layer.0.attention.attention.{name}" for name in ("query", "value"))
SMALL_A, SMALL_B = torch.randn(RANK, 24), torch.randn(24, RANK)
GOOD = {f"{PLAIN}.lora_A.weight": A, f"{PLAIN}.lora_B.weight": B}
REFUSED: tuple[tuple[dict[str, Any], dict[str, Tensor], str], ...] = (
    ({"peft_type": "IA3"}, GOOD, "has peft_type IA3, which vitpar does not support"),
    ({"rank_pattern": {"fc1": 2}}, GOOD, "has rank_pattern"),
    ({"r": 4}, GOOD, "have rank 4: set lora.rank to it"),
    ({"modules_to_save": ["head", "score"]}, GOOD, "lacks head, which adapter_config.json lists: save"),
    ({}, {f"{PLAIN}.lora_A.weight": A}, "lacks blocks.0.mlp.fc2.lora_B.weight"),
    ({}, {**GOOD, f"{PLAIN}.lora_B.weight": B[:5]}, r"has shape \[5, 3\] but the model has \[24, 3\]"),
    ({}, {**GOOD, f"{PLAIN}.lora_A.weight": A * torch.nan}, "has non-finite numbers"),
    ({}, {"head.weight": B}, "has no adapters of linear layers"),
    ({}, {**GOOD, "blocks.9.fc.weight": B.clone()}, "has tensors for blocks.9.fc.weight, which vit_custom lacks"),
    (
        {},
        {f"{QUERY}.lora_A.weight": SMALL_A, f"{VALUE}.lora_A.weight": SMALL_A + 1}
        | {f"{name}.lora_B.weight": SMALL_B.clone() for name in (QUERY, VALUE)},
        "have different A for parts of blocks.0.attn.qkv",
    ),
)


def test_other_files_are_refused(tmp_path: Path) -> None:
    made, _ = with_adapters(VIT)
    assert read_adapters(written(tmp_path / "good", {}, GOOD), made).keys() == GOOD.keys()
    bias = {"head.fc.weight": torch.ones(5, 24), "head.fc.bias": torch.ones(5), f"{PLAIN}.bias": torch.ones(24)}
    held = {"modules_to_save": ["head.fc", "score"], "target_modules": ["fc2", "query"], "bias": "all"}
    read_adapters(written(tmp_path / "held", held, GOOD | bias), made)
    for number, (settings, tensors, message) in enumerate(REFUSED):
        with pytest.raises(DataError, match=message):
            read_adapters(written(tmp_path / str(number), settings, tensors), made)
    few = adapted(VIT, RANK, ALPHA, targets=("qkv",))
    with pytest.raises(DataError, match=r"adapts blocks.0.mlp.fc2, .*: add it to lora.targets"):
        read_adapters(tmp_path / "good", few)
    with pytest.raises(DataError, match="cannot be read"):
        read_adapters(tmp_path / "nothing", made)


@pytest.mark.parametrize("names", ["files", "modules"])
def test_adapters_of_transformers_lack_what_their_settings_list(names: str, tmp_path: Path) -> None:
    """Names may be those of files or of modules of transformers 5."""
    made, _ = with_adapters(VIT)
    query = QUERY if names == "files" else "vit.layers.0.attention.q_proj"
    pair = {f"{query}.lora_A.weight": SMALL_A, f"{query}.lora_B.weight": SMALL_B}
    assert read_adapters(written(tmp_path / "good", {}, pair), made).keys() == {
        f"blocks.0.attn.qkv.lora_{end}.weight" for end in "AB"
    }
    value = VALUE if names == "files" else "vit.layers.0.attention.v_proj"
    refused: dict[str, dict[str, Any]] = {
        f"{query}.bias": {"bias": "all"},
        value: {"target_modules": [query, value]},
        "classifier": {"modules_to_save": ["classifier"]},
    }
    for number, (lacking, settings) in enumerate(refused.items()):
        with pytest.raises(DataError, match=f"lacks {re.escape(lacking)}, which"):
            read_adapters(written(tmp_path / str(number), settings, pair), made)


def test_adapters_are_merged_on_import(tmp_path: Path) -> None:
    """Separate queries and values may have different A; a factor by rsLoRA is alpha over the root of the rank."""
    model = LayeredModel(VIT)
    initialise(model, 0, VIT)
    (file,), _ = export_weights(
        weights_of(model, VIT, tmp_path / "here"), tmp_path / "there", "transformers", shard_bytes=10**9
    )
    state = load_file(file)
    pairs = {QUERY: (SMALL_A, SMALL_B), VALUE: (SMALL_A + 1, SMALL_B - 2)}
    tensors = {f"{n}.lora_{end}.weight": t for n, pair in pairs.items() for end, t in zip("AB", pair, strict=True)}
    tensors |= {"classifier.weight": torch.randn(5, 24), "classifier.bias": torch.randn(5)}
    for name, (a, b) in pairs.items():
        state[f"{name}.weight"] += ALPHA / RANK**0.5 * b @ a
    state |= {name: tensor for name, tensor in tensors.items() if name.startswith("classifier.")}
    kept = {"modules_to_save": ["classifier"], "target_modules": ["query", "value"]}
    files = written(tmp_path / "adapters", {"use_rslora": True, **kept}, tensors)
    imported = import_weights(tmp_path / "there", tmp_path / "merged", adapters=files)
    assert any("2 adapters of" in note for note in imported.notes)
    save_file(state, file, metadata={"format": "pt"})
    import_weights(tmp_path / "there", tmp_path / "expected")
    found, expected = open_weights(tmp_path / "merged"), open_weights(tmp_path / "expected")
    for name in dict(model.named_parameters()):
        torch.testing.assert_close(found.read(name), expected.read(name), atol=1e-6, rtol=1e-5, msg=name)
    headless = {name: tensor for name, tensor in tensors.items() if "classifier" not in name}
    with pytest.raises(DataError, match=r"lacks classifier, which adapter_config.json lists"):
        import_weights(tmp_path / "there", tmp_path / "never", adapters=written(tmp_path / "less", kept, headless))
    other = written(tmp_path / "other", {}, GOOD)
    with pytest.raises(DataError, match=r"has tensors for blocks.0.mlp.fc2.weight, which .* lacks"):
        import_weights(tmp_path / "there", tmp_path / "never", adapters=other)


@pytest.mark.parametrize("format_name", ["timm", "transformers"])
def test_peft_gives_the_same_logits(format_name: Format, tmp_path: Path) -> None:
    """peft loads what is exported, and what it saves is read, with the classifier that was trained."""
    peft = pytest.importorskip("peft")
    made, parameters = with_adapters(VIT)
    ours, base = filled(made, parameters), LayeredModel(VIT)
    initialise(base, 1, VIT)  # another classifier, which comes with the adapters
    base.load_state_dict({n: p for n, p in parameters.items() if n not in {*made.adapters, *HEAD}}, strict=False)
    export_weights(weights_of(base, VIT, tmp_path / "here"), tmp_path / "there", format_name, shard_bytes=10**9)
    write_files(tmp_path / "adapters", adapter_files(made, parameters.__getitem__, HEAD, format_name))

    def library() -> nn.Module:
        if format_name == "timm":
            return timm.create_model(f"local-dir:{tmp_path / 'there'}", pretrained=True)
        return transformers.ViTForImageClassification.from_pretrained(tmp_path / "there")

    images = torch.randn(3, 3, 8, 8)
    theirs = peft.PeftModel.from_pretrained(library(), tmp_path / "adapters").eval()
    with torch.no_grad():
        output = theirs(images)
        torch.testing.assert_close(getattr(output, "logits", output), ours(images), atol=1e-5, rtol=1e-5)
    if format_name == "transformers":
        return  # its separate queries, keys and values get different A
    settings = peft.LoraConfig(
        r=RANK, lora_alpha=7, target_modules=["qkv", "fc1"], modules_to_save=["head"], init_lora_weights=False
    )
    theirs = peft.get_peft_model(library(), settings).eval()
    theirs.save_pretrained(tmp_path / "saved")
    read = read_adapters(tmp_path / "saved", made)
    few, first = with_adapters(VIT, targets=("qkv", "fc1"))
    first |= {name: p for name, p in base.named_parameters() if name in HEAD}
    assert read.keys() == {*few.adapters, *FC}
    with torch.no_grad():
        expected = theirs(images)
        torch.testing.assert_close(filled(few, {**first, **read})(images), expected, atol=1e-5, rtol=1e-5)
