"""Parameters that layers share: checkpoints, debug checks and refusals. Their plans are in `helpers.plans`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import vitpar
from helpers.plans import ZBV
from helpers.ranks import Ranks
from helpers.shared_models import Relative, Tied
from helpers.trained import assembled, rows, trainer_of
from vitpar import parse, validate
from vitpar.errors import FaultError, ModelError, RecipeError, StrategyError
from vitpar.parallel import shared
from vitpar.recipe import read_recipe

MODELS = {"tied": Tied(), "relative": Relative()}


def trained(
    device: torch.device, name: str, mesh: str, settings: dict[str, Any], run_dir: Path, resume: Path | None = None
) -> list[str]:
    """Train to step 6 with debug checks; return the names of this rank's tensors after that. Runs on every rank."""
    vitpar.register(type(MODELS[name]), name)
    values = {"model.name": name, "model.image_size": 8, "parallel.mesh": mesh, "faults.debug_checks": True}
    values |= {"train.steps": 6, "train.batch_size": 12, "train.log_every": 1, "checkpoint.every": 3}
    values |= {"checkpoint.keep": 0, "data.workers": 0, "train.ema_decay": 0.9, "optimizer.lr": 0.01}
    trainer = trainer_of(read_recipe(None, {**values, **settings}), run_dir, resume=resume)
    trainer.run()
    return list(trainer.state.tensors())


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("tied", ("pp2", {}), ("fsdp2", {"optimizer.name": "lamb"})),
        ("tied", ("dp1", {"optimizer.name": "muon"}), ("pp2", {f"parallel.{k}": v for k, v in ZBV.items()})),
        ("relative", ("pp1: 0-1=tp2, *=fsdp2", {}), ("pp2", {"optimizer.name": "sgd"})),
    ],
)
def test_checkpoint_has_a_shared_parameter_once_and_resumes_under_another_plan(
    name: str,
    first: tuple[str, dict[str, Any]],
    second: tuple[str, dict[str, Any]],
    data: Path,
    tmp_path: Path,
    ranks: Ranks,
) -> None:
    settings = {"data.path": str(data), **first[1], **{k: v for k, v in second[1].items() if k.startswith("optim")}}
    ranks(parse(first[0]).world_size).run(trained, name, first[0], settings, tmp_path / "first")
    checkpoint = tmp_path / "first" / "checkpoints" / "step_3"
    saved = assembled(checkpoint)
    copies = MODELS[name].shared.keys()
    assert not [key for key in saved for copy in copies if key.endswith(f".{copy}")]
    settings |= second[1]
    found = ranks(parse(second[0]).world_size).run(
        trained, name, second[0], settings, tmp_path / "second", resume=checkpoint
    )
    held = {key for names in found for key in names}
    assert held > saved.keys() and {f"model.{copy}" for copy in copies} < held
    stayed, moved = rows(tmp_path / "first", after=3), rows(tmp_path / "second")
    assert [row["loss"] for row in moved] == pytest.approx([row["loss"] for row in stayed], rel=1e-5)


def drifting(device: torch.device, folder: Path, data: Path) -> str:
    """Train with a copy whose gradient stays its own; return the error. Runs on every rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "_give", lambda holders, total: None)
        try:
            trained(device, "tied", "pp2", {"data.path": str(data)}, folder)
        except FaultError as error:
            return str(error)
    return "nothing"


def test_debug_checks_find_a_copy_that_differs_from_its_owner(data: Path, tmp_path: Path, ranks: Ranks) -> None:
    for error in ranks(2).run(drifting, tmp_path / "run", data):
        assert error == "after step 1, embed.matrix differs between rank 0 and rank 1"


@dataclass(frozen=True)
class Wrong(Tied):
    """Tied with another dict of shared parameters."""

    pairs: tuple[tuple[str, str], ...] = ()

    @property
    def shared(self) -> dict[str, str]:
        return dict(self.pairs)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ({"head.matrx": "embed.matrix"}, "shares 'head.matrx', which no layer has: correct the name"),
        ({"embed.matrix": "head.matrix"}, "embed.matrix of own is a copy of head.matrix, which comes later: let the"),
        ({"head.matrix": "embed.codes.weight"}, r"of shape \[16, 24\], but its owner .* of shape \[16, 16\]: make"),
        (
            {"blocks.1.first.bias": "blocks.0.first.bias", "blocks.2.first.bias": "blocks.1.first.bias"},
            "shares blocks.1.first.bias, which is a copy itself: name the owner blocks.0.first.bias",
        ),
    ],
)
def test_models_that_share_wrongly_are_refused(pairs: dict[str, str], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        _ = Wrong(pairs=tuple(pairs.items())).parameters  # the first that commands ask for


def test_plans_and_freezing_that_separate_layers_which_share_are_refused() -> None:
    with pytest.raises(StrategyError, match=r"embed and head share embed.matrix, but .* dp2 and fsdp2: give them the"):
        validate(parse("pp1: embed=dp2, *=fsdp2"), Tied(), 16)
    with pytest.raises(ModelError, match=r"has 376,832 elements, and every rank keeps all of a table: give it another"):
        validate(parse("dp2"), Relative(heads=16384, width=16384), 16)
    recipe = read_recipe(None, {"train.freeze": "embed", "data.path": "none", "train.steps": 1})
    with pytest.raises(RecipeError, match=r"freezes embed but not head, which share embed.matrix: freeze all layers"):
        recipe.frozen(Tied())
