"""Runs with frozen parameters or adapters: checkpoints are complete, move between plans, and can be unfrozen."""

from pathlib import Path

import pytest
import torch

from helpers.ranks import Ranks
from helpers.trained import STEPS, assembled, recipe_of, rows, train, trainer_of
from vitpar import model_config
from vitpar.checkpoint.folder import Checkpoint
from vitpar.errors import CheckpointError
from vitpar.models.lora import LoRA
from vitpar.recipe import Recipe
from vitpar.runs.folder import RunRecord
from vitpar.weights.adapters import adapter_files
from vitpar.weights.folder import open_weights, write_files

FREEZE = {"train.freeze": "embed, 0-1", "optimizer.lr": 1e-3}
FROZEN = ("embed.", "blocks.0.", "blocks.1.")


def stopped(device: torch.device, recipe: Recipe, run_dir: Path) -> None:
    """Train half of a run; runs on every rank."""
    trainer = trainer_of(recipe, run_dir)
    trainer.total_steps = STEPS
    trainer.run()


@pytest.mark.slow
def test_run_with_frozen_layers_moves_to_another_plan(data: Path, tmp_path: Path, ranks: Ranks) -> None:
    """Checkpoints and weights have frozen parameters, equal to their averages and without optimizer state."""
    first, second = (recipe_of(data, mesh, **FREEZE) for mesh in ("pp2", "fsdp2"))
    ranks(2).run(train, first, tmp_path / "through")
    ranks(2).run(stopped, first, tmp_path / "moved")
    ranks(2).run(train, second, tmp_path / "moved", resume=tmp_path / "moved")
    record = RunRecord(tmp_path / "moved")  # it understands the lines that a run writes
    starts = [(start.plan, start.step, start.steps) for start in record.events.starts]
    assert starts == [("pp2", 0, 2 * STEPS), ("fsdp2", STEPS, 2 * STEPS)]
    start = record.events.starts[0]
    assert (start.train_samples, start.val_samples, start.batch_size) == (35, 17, 24)
    assert record.events.saves == [STEPS, 2 * STEPS] and record.state == "complete" and record.plan_words == "fsdp2"
    assert record.metrics.steps == 2 * STEPS and record.last("top1") is not None
    for one, other in zip(rows(tmp_path / "through"), rows(tmp_path / "moved"), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
    begin, end = (assembled(tmp_path / "moved" / "checkpoints" / f"step_{step}") for step in (STEPS, 2 * STEPS))
    weights = open_weights(tmp_path / "moved" / "weights")
    names = [name.removeprefix("model.") for name in end if name.startswith("model.")]
    states = {name.split(".", 2)[2] for name in end if name.startswith("optimizer.")}
    assert any(name.startswith(FROZEN) for name in names)
    for name in names:
        frozen = name.startswith(FROZEN)
        assert (name in states) != frozen
        assert torch.equal(begin[f"model.{name}"], end[f"model.{name}"]) == frozen, name
        assert not frozen or torch.equal(end[f"ema.{name}"], end[f"model.{name}"])
        torch.testing.assert_close(weights.read(name), end[f"ema.{name}"])


def resumed(device: torch.device, recipe: Recipe, run_dir: Path, allowed: tuple[str, ...]) -> str:
    """Resume a run with changed settings; return the refusal, or nothing; runs on every rank."""
    try:
        trainer_of(recipe, run_dir, resume=run_dir, allow_change=allowed).run()
    except CheckpointError as error:
        return str(error)
    return ""


def test_unfreezing_on_resume_must_be_allowed(data: Path, tmp_path: Path, ranks: Ranks) -> None:
    """Parameters that were frozen then start without optimizer state; the others keep theirs."""
    run = tmp_path / "run"
    ranks(2).run(stopped, recipe_of(data, "dp2", **FREEZE), run)
    thawed = recipe_of(data, "fsdp2", **{**FREEZE, "train.freeze": "embed"})
    (refusal, _) = ranks(2).run(resumed, thawed, run, ())
    assert "train.freeze was embed, 0-1 and is embed" in refusal and "--allow-change train.freeze" in refusal
    assert ranks(2).run(resumed, thawed, run, ("train.freeze",)) == ["", ""]
    end = assembled(run / "checkpoints" / f"step_{2 * STEPS}")
    counts = {name.split(".", 2)[2]: int(end[name]) for name in end if name.startswith("optimizer.step.")}
    assert counts["blocks.0.norm1.weight"] == STEPS and counts["head.fc.weight"] == 2 * STEPS
    assert "embed.pos_embed" not in counts


ADAPTERS = {"lora.rank": 3, "lora.alpha": 6.0, "lora.train": "head, *.norm1.*", "optimizer.lr": 1e-2}


@pytest.mark.slow
def test_run_with_adapters_moves_to_another_plan_and_ends_in_merged_weights(
    data: Path, tmp_path: Path, ranks: Ranks
) -> None:
    """Final weights, and those read from a checkpoint, are W + alpha / rank · B A of the averages."""
    first, second = (recipe_of(data, mesh, **ADAPTERS) for mesh in ("tp2", "fsdp2"))
    ranks(2).run(train, first, tmp_path / "through")
    ranks(2).run(stopped, first, tmp_path / "moved")
    (refusal, *_) = ranks(2).run(
        resumed, recipe_of(data, "dp2", **{**ADAPTERS, "lora.rank": 4}), tmp_path / "moved", ()
    )
    assert "lora.rank was 3 and is 4" in refusal
    ranks(2).run(train, second, tmp_path / "moved", resume=tmp_path / "moved")
    for one, other in zip(rows(tmp_path / "through"), rows(tmp_path / "moved"), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
    begin, end = (assembled(tmp_path / "moved" / "checkpoints" / f"step_{step}") for step in (STEPS, 2 * STEPS))
    states = {name.split(".", 2)[2] for name in end if name.startswith("optimizer.")}
    trained = {n for n in (n.removeprefix("model.") for n in end if n.startswith("model.")) if ".lora_" in n}
    assert len(trained) == 2 * 4 * 4
    trained |= {"head.fc.weight", "head.fc.bias", "head.norm.weight", "head.norm.bias"}
    assert states == trained | {f"blocks.{block}.norm1.{end}" for block in range(4) for end in ("weight", "bias")}
    assert all(
        torch.equal(begin[f"model.{n}"], end[f"model.{n}"]) for n in ("embed.pos_embed", "blocks.0.attn.qkv.bias")
    )
    adapters = {name for name in end if name.startswith("ema.") and ".lora_" in name}
    for folder in (tmp_path / "moved" / "weights", tmp_path / "moved" / "checkpoints" / f"step_{2 * STEPS}"):
        weights = open_weights(folder)
        assert weights.config == model_config(
            "vit_custom",
            **{"image_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 4, "num_heads": 4, "init": "moco"},
            num_classes=weights.config.num_classes,
        )
        for name, averaged in ((n.removeprefix("ema."), t) for n, t in end.items() if n.startswith("ema.")):
            if f"ema.{name}" in adapters:
                continue
            expected, module = averaged, name.removesuffix(".weight")
            if f"ema.{module}.lora_A.weight" in adapters:
                expected = averaged + 2 * end[f"ema.{module}.lora_B.weight"] @ end[f"ema.{module}.lora_A.weight"]
                assert not torch.equal(expected, averaged)
            torch.testing.assert_close(weights.read(name), expected, msg=name)
    checkpoint = Checkpoint.open(tmp_path / "moved" / "checkpoints" / f"step_{2 * STEPS}")
    alone = open_weights(checkpoint.path, merge=False)
    assert isinstance(alone.config, LoRA)
    others = {name for name in trained if ".lora_" not in name}
    write_files(tmp_path / "adapters", adapter_files(alone.config, alone.read, others, "timm"))
    begins = recipe_of(data, "dp2", **{**ADAPTERS, "lora.alpha": 3.0, "lora.weights": str(tmp_path / "adapters")})
    for found in ranks(2).run(begun, begins, tmp_path / "begun"):
        for name in trained:
            expected = end[f"ema.{name}"] * (2 if name.endswith("lora_B.weight") else 1)  # the factor is half as large
            torch.testing.assert_close(torch.from_numpy(found[name]), expected, msg=name)


def begun(device: torch.device, recipe: Recipe, run_dir: Path) -> dict[str, object]:
    """Return the parameters that a run begins with; runs on every rank."""
    return {name: p.detach().numpy() for name, p in trainer_of(recipe, run_dir).model.named_parameters()}
