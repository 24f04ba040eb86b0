"""`vitpar checkpoint`: list, info, verify, diff and export."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from helpers.ranks import RankPool
from helpers.small_data import pack_small
from helpers.trained import assembled, recipe_of, train
from vitpar.launch import ALONE, join, leave
from vitpar_cli.checkpoint import app

STEPS = 3


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, ranks: Callable[[int], RankPool]) -> Path:
    """Train three runs and return their folder.

    meshed: under fsdp2xtp2
    alone: in one process with the same recipe
    plain: in one process with another seed and without averages
    """
    place = tmp_path_factory.mktemp("runs")
    data = pack_small(place)
    best = {"checkpoint.keep_best": True, "train.eval_every": STEPS}
    ranks(4).run(train, recipe_of(data, "fsdp2xtp2+ckpt", **best), place / "meshed")
    for name, more in (("alone", {}), ("plain", {"train.seed": 1})):
        join(ALONE, "cpu")
        recipe = recipe_of(data, "dp1", **best, **more)
        if name == "plain":
            recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"ema_decay": None})})
        train(torch.device("cpu"), recipe, place / name)
        leave()
    return place


def vitpar(*words: str, code: int = 0) -> str:
    """Return the output of `vitpar checkpoint <words>`."""
    done = CliRunner().invoke(app, words)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        assert code == 2, done.exception
        return str(done.exception)
    assert done.exit_code == code, done.output
    return done.stdout


def test_checkpoints_are_listed_counted_and_verified(runs: Path) -> None:
    found = json.loads(vitpar("list", str(runs / "meshed"), "--json"))
    assert [(row["step"], row["samples"]) for row in found] == [(STEPS, STEPS * 24), (2 * STEPS, 2 * STEPS * 24)]
    assert sum(row["best"] for row in found) == 1 and all(row["ranks"] == 4 and not row["problem"] for row in found)
    first, last = (runs / "meshed" / "checkpoints" / f"step_{step}" for step in (STEPS, 2 * STEPS))
    assert found[0]["bytes"] == sum(path.stat().st_size for path in first.iterdir() if path.name != "index.json")
    assert "144" in vitpar("list", str(runs / "meshed"))

    found, whole = json.loads(vitpar("info", str(runs / "meshed"), "--json")), assembled(last)
    assert found["step"] == 2 * STEPS and found["plan"] == "fsdp2xtp2+ckpt"
    for group, sums in found["tensors"].items():
        inside = [tensor for name, tensor in whole.items() if name.startswith(f"{group}.")]
        elements, size = sum(tensor.numel() for tensor in inside), sum(tensor.nbytes for tensor in inside)
        assert sums == {"tensors": len(inside), "elements": elements, "bytes": size}
    assert "fsdp2xtp2+ckpt" in vitpar("info", str(first))

    assert "all checksums match" in vitpar("verify", str(runs / "meshed"))
    (path,) = last.glob("shard-00003*")
    content = path.read_bytes()
    path.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
    assert vitpar("verify", str(runs / "meshed"), code=1) == f"{path.name} has a wrong checksum\n"
    path.write_bytes(content)


def test_diff_distinguishes_rounding_from_another_run(runs: Path) -> None:
    same = runs / "meshed" / "checkpoints" / f"step_{STEPS}"
    assert json.loads(vitpar("diff", str(same), str(same), "--json"))["apart"] == []
    near = json.loads(vitpar("diff", str(runs / "meshed"), str(runs / "alone"), "--json", code=1))
    assert near["recipe"] == [] and near["steps"] == [2 * STEPS] * 2
    assert 0 < max(row["largest"] for row in near["apart"] if row["name"].startswith("model.")) < 1e-3
    far = json.loads(vitpar("diff", str(runs / "alone"), str(runs / "plain"), "--json", code=1))
    assert "train.seed was 0 and is 1" in far["recipe"]
    assert max(row["largest"] or 0 for row in far["apart"]) > 1e-2
    alone = [row["name"] for row in far["apart"] if row["largest"] is None]
    assert alone and all(name.startswith("ema.") for name in alone)
    text = vitpar("diff", str(runs / "alone"), str(runs / "plain"), code=1)
    assert "train.seed was 0 and is 1" in text and "tensors differ" in text


@pytest.mark.parametrize(("options", "prefix", "size"), [([], "ema.", "10KB"), (["--no-averages"], "model.", "5GB")])
def test_export_writes_readable_weights(options: list[str], prefix: str, size: str, runs: Path) -> None:
    out = runs / f"out-{size}"
    said = vitpar("export", str(runs / "meshed"), "--out", str(out), "--shard-size", size, *options)
    files = sorted(out.glob("*.safetensors"))
    assert f"step {2 * STEPS} written to" in said and (len(files) > 3) is (size == "10KB")
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    read: dict[str, Any] = {}
    for path in files:
        inside = load_file(path)
        assert size != "10KB" or path.stat().st_size < 12_000 or len(inside) == 1
        assert all(index[name] == path.name for name in inside)
        read |= inside
    whole = assembled(runs / "meshed" / "checkpoints" / f"step_{2 * STEPS}")
    expected = {name.removeprefix(prefix): tensor for name, tensor in whole.items() if name.startswith(prefix)}
    assert read.keys() == expected.keys() == index.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())
    for path in (runs / "meshed" / "weights").glob("*.safetensors") if prefix == "ema." else ():
        # the run itself writes the averages at its end
        assert all(torch.equal(read[name], tensor) for name, tensor in load_file(path).items())


def test_exported_adapters_merge_into_the_weights_that_they_adapt(runs: Path) -> None:
    """A run's adapters, merged into its initial weights by the import, give the weights that the run saved."""
    base, adapted = runs / "plain" / "weights", runs / "adapted"
    lora = {"model.weights": str(base), "lora.rank": 2, "lora.alpha": 4.0, "train.ema_decay": None}
    join(ALONE, "cpu")
    train(torch.device("cpu"), recipe_of(runs / "packed", "dp1", **lora), adapted)
    leave()
    vitpar("export", str(runs / "plain"), "--format", "timm", "--out", str(runs / "base"))
    said = vitpar("export", str(adapted), "--adapters", "--format", "timm", "--out", str(runs / "adapters"))
    assert f"at step {2 * STEPS} written to" in said
    merge = ["--adapters", str(runs / "adapters"), "--out", str(runs / "merged")]
    vitpar("import", str(runs / "base"), *merge)
    merged, saved, first = (
        {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
        for folder in (runs / "merged", adapted / "weights", base)
    )
    assert merged.keys() == saved.keys()
    for name, tensor in saved.items():
        torch.testing.assert_close(merged[name], tensor, atol=1e-6, rtol=0)
    assert any((first[name] - tensor).abs().max() > 1e-5 for name, tensor in saved.items() if "blocks" in name)


IMPOSSIBLE = [
    (["list", "."], "has no checkpoints"),
    (["verify", "gone/checkpoints/step_3"], "there is no folder 'gone/checkpoints/step_3'"),
    (["export", "alone", "--out", "meshed"], "'meshed' exists and is not empty"),
    (["export", "alone", "--out", "new", "--shard-size", "many"], "--shard-size many is not a size"),
    (["export", "alone", "--out", "new", "--format", "timm", "--shard-size", "1GB"], "no effect with --format timm"),
    (["export", "alone", "--out", "alone/log.txt/new"], "cannot be written"),
]


def test_impossible_checkpoint_commands_are_refused(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    for words, message in IMPOSSIBLE:
        assert message in vitpar(*words, code=2), words
    assert not list(runs.glob("*.partial"))
