"""Masked autoencoding through the command line: training, evaluation, resuming, fine-tuning, weights, refusals."""

import json
import re
import shutil
from base64 import b64decode
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from helpers.command_line import Command, Refused
from helpers.converted import converted
from helpers.html_pages import Page
from helpers.mae_models import DECODER, fixed_positions, mae, twin
from helpers.oracles import timm, transformers
from helpers.small_data import damage
from vitpar.data.images import decode
from vitpar.data.shards.shard_set import ShardSet
from vitpar.errors import DataError
from vitpar.models.mae.layers import masked, masking_noise
from vitpar.recipe import read_recipe
from vitpar.recipe.defaults import recipe_for
from vitpar.runs.predictions import drawn_samples
from vitpar.tasks.data import transforms
from vitpar.weights.folder import open_weights
from vitpar.weights.importing import import_weights

SMALL = {"image_size": 8, "patch_size": 2, "embed_dim": 24, "depth": 2, "num_heads": 2, "mlp_hidden_dim": 40}
VIT = ("--model", "vit_custom", *(word for key, value in SMALL.items() for word in ("--set", f"model.{key}={value}")))
MAE = (
    *("--task", "mae", "--model", "mae_custom", *VIT[2:]),
    *(word for key, value in DECODER.items() for word in ("--set", f"model.options.{key}={value}")),
)
DATA = ("--data", "data", "--set", "data.workers=0", "--batch-size", "16")
STREAM = " ".join(
    f"--set stream.{one}" for one in ("train=x.tar", "val=x.tar", "samples=9", "val_samples=9", "classes=7")
)


def test_encoder_is_pretrained_resumed_evaluated_and_fine_tuned(place: Path, vitpar: Command, refused: Refused) -> None:
    def said(*words: str) -> str:
        done = vitpar(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    trained = said("train", *MAE, *DATA, "--mesh", "pp2xtp2", "--steps", "2", "--run-dir", "run")
    assert "12 outputs" in trained and "crop 0.2-1, flip 0.5" in trained and "betas 0.9 and 0.95" in trained
    more = ("--mesh", "fsdp2", "--steps", "3", "--allow-change", "train.steps")
    assert "resuming from run/checkpoints/step_2" in said("train", "--resume", "run", *more)
    figures = [json.loads(said("eval", "--checkpoint", "run", "--mesh", mesh, "--json")) for mesh in ("dp1", "pp2")]
    assert figures[0]["samples"] == 17 and figures[0] == pytest.approx(figures[1], rel=1e-5)
    tuning = "train --task classify --weights run --steps 1 --mesh tp2 --run-dir tuned"
    tuned = said(*tuning.split(), *DATA)
    assert "vit_custom" in tuned and "train.epochs" not in tuned
    again = said("train", "--weights", "run", *DATA, "--dry-run", "--steps", "4")
    assert "mae_custom" in again
    features = said("features", "--data", "data", "--checkpoint", "run", "--out", "f.parquet")
    assert "f.parquet: 17 images, 24 features each (input of head.fc)" in features
    assert "the encoder of mae_custom is used; what only pretraining needs is left out" in tuned
    assert "the classifier of 7 classes is newly initialised (the weights have none)" in tuned
    probe = ("--set", "train.freeze=embed, *", "--set", "model.norm_eps=1e-6", "--run-dir", "probe")
    said("train", "--weights", "run/checkpoints/step_3", *VIT, *DATA, "--steps", "1", *probe)
    before, after = open_weights(place / "run" / "weights"), open_weights(place / "probe" / "weights")
    for name in ("embed.cls_token", "embed.patch_embed.proj.weight", "blocks.1.attn.qkv.weight"):
        assert torch.equal(before.read(name), after.read(name)), name
    assert torch.equal(after.read("embed.pos_embed"), fixed_positions(mae(**SMALL), 24))
    words = ("pool=avg", "num_reg_tokens=1", "options.fc_norm=true")
    pooled = (*probe[:-1], "pooled", *(word for setting in words for word in ("--set", f"model.{setting}")))
    averaged = said("train", "--weights", "run/weights", *VIT, *DATA, "--steps", "1", *pooled)
    assert "the class token becomes a register, and tokens are averaged" in averaged
    averaging = open_weights(place / "pooled" / "weights")
    assert torch.equal(before.read("embed.cls_token"), averaging.read("embed.reg_token"))
    for name in ("embed.pos_embed", "blocks.1.attn.qkv.weight"):
        assert torch.equal(after.read(name), averaging.read(name)), name
    said("report", "run", "--images", "17", "--out", "page.html")
    losses = refuse_wrong_pictures(place, range(17))
    assert sum(losses) / 17 == pytest.approx(figures[0]["loss"], abs=1e-4), "as the evaluation masks and counts"
    first, bad, *others = drawn_samples(17, 5)
    shutil.copytree(place / "data", place / "spoilt")
    damage(place / "spoilt", "val", bad)
    done = vitpar("report", "run", "--images", "5", "--out", "page.html", "--data", "spoilt")
    assert done.returncode == 1 and ShardSet.open(place / "data", "val").name(bad) in done.stderr, done.stderr
    assert refuse_wrong_pictures(place, [first, *others]) == [losses[number] for number in (first, *others)]
    Image.new("RGB", (8, 8)).save(place / "one.png")
    refused(place, [(words.split(), sentence) for words, sentence in REFUSED])


def refuse_wrong_pictures(place: Path, numbers: Sequence[int]) -> list[float]:
    """Compare the pictures of validation images on the page with the images and masks, and return the losses."""
    page = Page((place / "page.html").read_text())
    assert page.outside == [] and "Confusion matrix" not in page.text and "mistakes" not in page.text
    images = page.all("img")
    assert [image["alt"] for image in images] == ["original", "masked", "reconstruction"] * len(numbers)
    drawn = [np.array(Image.open(BytesIO(b64decode(str(image["src"]).partition(",")[2])))) for image in images]
    shards, prepare = ShardSet.open(place / "data", "val"), transforms(read_recipe(place / "run" / "recipe.toml"), 8)[1]
    grid = masked(torch.zeros(1, dtype=torch.int64), 16, 4).view(4, 4).numpy()
    hidden = np.kron(grid, np.ones((2, 2), dtype=bool))[..., None]
    for number, original, seen, made in zip(numbers, drawn[::3], drawn[1::3], drawn[2::3], strict=True):
        image = prepare(decode(shards.read(number))).permute(1, 2, 0).numpy()
        assert (original == image).all() and (seen == np.where(hidden, 128, image)).all()
        assert (made == image)[~np.repeat(hidden, 3, 2)].all() and (made != image).any()
    return [float(loss) for loss in re.findall(r"loss (\d\.\d{4})", page.text.partition("Validation images")[2])]


REFUSED = (
    ("eval --checkpoint run --predictions p.parquet", "--predictions has nothing to write for task 'mae'"),
    ("predict one.png --checkpoint run", "`vitpar predict` has nothing to print for task 'mae'"),
    ("train --data data --model mae_vit_base --steps 1", "task 'classify' does not train mae_vit_base, which only"),
    (
        "train --data data --task mae --model vit_nano_patch4_16 --steps 1",
        "task 'mae' does not train vit_nano_patch4_16, but only models of the family mae",
    ),
    (
        "train --data data --task mae --model mae_vit_base --steps 1 --set augment.mixup=0.5",
        "augment.mixup is 0.5, but task 'mae' does not mix images: set it to 0",
    ),
    *(
        (f"{words} {STREAM}", "task 'mae' needs streamed images on all ranks that give outputs: pack the data, or")
        for words in (
            "train --task mae --model mae_vit_base --steps 1 --mesh pp2",
            "train --task mae --model mae_vit_base --steps 1 --mesh tp2+sp",
            "eval --checkpoint run --mesh pp2",
            "bench --recipe run/recipe.toml --mesh pp2",
        )
    ),
)


def test_default_settings_are_those_of_the_paper() -> None:
    options = {"data.path": "x", "task.name": "mae", "model.name": "mae_vit_base", "train.batch_size": 4096}
    recipe = recipe_for(1_281_167, options)
    assert recipe.optimizer.lr == 0.0024 and recipe.optimizer.betas == (0.9, 0.95)
    assert recipe.optimizer.weight_decay == 0.05 and recipe.data.crop_scale == (0.2, 1.0)
    assert (recipe.train.epochs, str(recipe.lr_schedule.warmup)) == (800, "40 epochs")
    assert recipe.augment.policy is None and recipe.augment.repeats == 1 and not recipe.augment.mixup
    assert recipe_for(10_000_000, options).train.epochs == 30
    padded = recipe_for(50_000, {**options, "data.crop_padding": 4}).data
    assert padded.model_fields_set == {"path", "crop_padding"}, "no range of areas with padding"


def test_weights_of_transformers_come_in_and_go_out(tmp_path: Path, vitpar: Command) -> None:
    config = mae()
    theirs = twin(config)
    theirs.save_pretrained(tmp_path / "there")
    done = import_weights(tmp_path / "there", tmp_path / "ours")
    assert done.config == mae(init="mae") and not done.new_classifier
    values = converted(dict(theirs.state_dict()), config)
    assert all(torch.equal(open_weights(tmp_path / "ours").read(name), value) for name, value in values.items())
    for library, folder in (("transformers", "again"), ("timm", "encoder")):
        command = ("checkpoint", "export", str(tmp_path / "ours"), "--format", library, "--out", str(tmp_path / folder))
        exported = vitpar(*command)
        assert exported.returncode == 0, exported.stderr
    again = transformers.ViTMAEForPreTraining.from_pretrained(tmp_path / "again").eval()
    x, noise = torch.randn(2, 3, 16, 16), masking_noise(torch.arange(2), config.patches)
    with torch.no_grad():
        expected = theirs.eval()(x, noise=noise).logits
        torch.testing.assert_close(again(x, noise=noise).logits, expected)
        # The encoder sees all patches in timm's model.
        encoder = timm.create_model(f"local-dir:{tmp_path / 'encoder'}", pretrained=True).eval()
        theirs.config.mask_ratio = 0.0
        unmasked = theirs.vit(x, noise=torch.arange(16.0).expand(2, -1)).last_hidden_state
        torch.testing.assert_close(encoder.forward_features(x), unmasked, rtol=1e-4, atol=1e-5)


def test_weights_of_the_authors_come_in_as_autoencoder_or_encoder(tmp_path: Path, vitpar: Command) -> None:
    """The export for timm has the authors' names, in two files."""
    config = mae(init="mae")
    twin(config).save_pretrained(tmp_path / "there")
    import_weights(tmp_path / "there", tmp_path / "ours")
    done = vitpar("checkpoint", "export", str(tmp_path / "ours"), "--format", "timm", "--out", str(tmp_path / "both"))
    assert done.returncode == 0, done.stderr
    state = {**load_file(tmp_path / "both/model.safetensors"), **load_file(tmp_path / "both/classifier.safetensors")}
    known = {"cls_token", "pos_embed", "mask_token", "decoder_pos_embed", "patch_embed.proj.weight"}
    known |= {"norm.weight", "decoder_norm.bias", "decoder_embed.weight", "decoder_pred.weight"}
    known |= {"blocks.0.attn.qkv.weight", "decoder_blocks.1.mlp.fc2.bias"}
    assert known <= state.keys() and state["patch_embed.proj.weight"].shape == (24, 3, 4, 4)
    torch.save({"model": state}, tmp_path / "mae_pretrain.pth")
    with pytest.raises(DataError, match="do not show the number of heads: name the model with --model"):
        import_weights(tmp_path / "mae_pretrain.pth", tmp_path / "lost")
    (tmp_path / "known").mkdir()
    save_file(state, tmp_path / "known" / "model.safetensors")
    hints = {"num_heads": 4, "decoder_num_heads": 4}
    (tmp_path / "known" / "config.json").write_text(json.dumps(hints))
    again, ours = import_weights(tmp_path / "known", tmp_path / "again"), open_weights(tmp_path / "ours")
    assert again.config == config and again.format == "mae"
    for name in (f"{layer.name}.{key}" for layer in config.layers.values() for key in layer.parameters):
        assert torch.equal(open_weights(tmp_path / "again").read(name), ours.read(name)), name
    assert '[task]\nname = "mae"' in (tmp_path / "again" / "recipe.toml").read_text()
    encoder = import_weights(tmp_path / "both", tmp_path / "vit", classes=5)
    assert encoder.config.FAMILY == "vit" and encoder.new_classifier
