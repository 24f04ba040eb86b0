"""Norms of gradients and sizes of updates by group of layers, against the parameters in checkpoints."""

import json
from pathlib import Path

import pytest
import torch

from helpers.ranks import Ranks
from helpers.trained import LAYERWISE, assembled, recipe_of, train
from vitpar import model_config
from vitpar.training.metrics import device_load
from vitpar.training.signals import layer_groups

LR = 0.1


def prefixes(group: str) -> tuple[str, ...]:
    """Return the beginnings of the names of a group's parameters in a checkpoint."""
    if not group.startswith("blocks "):
        return (f"model.{group}.",)
    first, _, last = group.removeprefix("blocks ").partition(" to ")
    return tuple(f"model.blocks.{number}." for number in range(int(first), int(last or first) + 1))


@pytest.mark.parametrize(("mesh", "freeze"), [("dp4+zero2", ""), ("fsdp2xtp2+ckpt", "embed, *.bias"), (LAYERWISE, "")])
def test_signals_are_those_of_the_global_model(
    mesh: str, freeze: str, data: Path, tmp_path: Path, ranks: Ranks
) -> None:
    """SGD without decay and clipping moves weights by the rate times the gradient, so checkpoints give both."""
    settings = {"optimizer.name": "sgd", "optimizer.lr": LR, "optimizer.weight_decay": 0.0, "optimizer.momentum": 0.0}
    settings |= {"lr_schedule.shape": "constant", "lr_schedule.warmup": 0, "train.clip_grad_norm": 0.0}
    settings |= {"train.ema_decay": None, "train.steps": 3, "train.log_every": 2, "checkpoint.every": 1}
    settings |= {"train.freeze": freeze} if freeze else {}
    ranks(4).run(train, recipe_of(data, mesh, **settings), tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["kind"] == "train"]
    assert ["grad_norms" in row for row in rows] == [True, True, False]
    assert len(rows[0]["memory_by_rank"]) == 4 and rows[0]["memory_by_rank"][0] == rows[0]["memory_bytes"]
    before, after = (assembled(tmp_path / "run" / "checkpoints" / f"step_{step}") for step in (1, 2))
    groups = ["embed", *(f"blocks {number}" for number in range(4)), "head"]
    assert list(rows[1]["grad_norms"]) == list(rows[1]["update_ratios"]) == groups[bool(freeze) :]
    for group, norm in rows[1]["grad_norms"].items():
        names = [name for name in before if name.startswith(prefixes(group))]
        names = [name for name in names if not (freeze and name.endswith(".bias"))]
        moved = torch.cat([(after[name].double() - before[name].double()).flatten() for name in names]).norm()
        weights = torch.cat([before[name].double().flatten() for name in names]).norm()
        assert norm == pytest.approx(float(moved) / LR, rel=1e-4)
        assert rows[1]["update_ratios"][group] == pytest.approx(float(moved / weights), rel=1e-4)


def test_load_of_a_gpu_is_read_where_nvml_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 87)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device: 650_500)
    assert device_load(torch.device("cpu")) is None
    assert device_load(torch.device("cuda", 0)) == (0.87, 650.5)
    monkeypatch.undo()
    assert device_load(torch.device("cuda", 1)) is None, "there is no GPU, or no NVML"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vit_base_patch16_224", ["embed", *(f"blocks {a} to {a + 2}" for a in (0, 3, 6, 9)), "head"]),
        ("t5_small", ["embed", "encoder", "dec_embed", "decoder", "head"]),
        ("swin_tiny_patch4_window7_224", ["embed", "stage1", "stage2", "stage3", "stage4", "head"]),
    ],
)
def test_every_layer_is_in_one_group(name: str, expected: list[str]) -> None:
    config = model_config(name)
    groups = layer_groups(config)
    assert list(groups) == expected
    assert [layer for layers in groups.values() for layer in layers] == list(config.layers)
