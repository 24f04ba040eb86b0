"""Corrections of profiles from measured plans."""

from pathlib import Path
from typing import Any

import pytest

from vitpar.models import model_config
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import Price, price
from vitpar.planner.measure.steps import Measured
from vitpar.planner.profile.cluster import find_cluster
from vitpar.planner.profile.estimate import estimate_model, tensors
from vitpar.planner.profile.profiles import Hardware, ModelProfile
from vitpar.planner.report.accuracy import LEAST, Correction, accuracy, correction, measured_row
from vitpar.strategy import parse, validate

CONFIG = model_config("vit_custom", embed_dim=256, depth=4, num_heads=4, patch_size=8, image_size=64, num_classes=10)
PLANS = ("dp4", "fsdp4", "tp4", "dp2xtp2", "tp4+sp", "dp4+zero1")


def profiles() -> tuple[Hardware, ModelProfile]:
    hardware = find_cluster("4xA100").hardware()
    return hardware, estimate_model(CONFIG, "fp32", hardware, tensors(CONFIG, 4))


def prices(hardware: Hardware, model: ModelProfile) -> list[Price]:
    costs = LayerCosts(CONFIG, hardware, model)
    return [price(validate(parse(words), CONFIG, 32), costs, 32) for words in PLANS]


def row(computing: float, sending: float, measured: float, missing: int | None = None) -> dict[str, Any]:
    """Return the row of a plan that takes `measured` seconds, and `missing` bytes more than predicted."""
    return {
        "predicted_seconds": computing + sending,
        "predicted_breakdown_seconds": {"forward": computing, "tensor": sending},
        "measured_seconds": measured,
        "predicted_memory_bytes": 0,
        "measured_memory_bytes": [missing],
    }


def test_correction_recovers_known_factors() -> None:
    """The steps take 1.5 times the predicted computing and 0.8 times the predicted sending."""
    parts = [(1.0, 0.1), (2.0, 1.0), (1.0, 3.0), (4.0, 0.0)]
    found = correction([row(c, s, 1.5 * c + 0.8 * s, 30) for c, s in parts])
    assert found.computing == pytest.approx(1.5) and found.sending == pytest.approx(0.8)
    assert found.memory_bytes == 30 and found.plans == 4
    # Plans that do not distinguish the two get one factor.
    found = correction([row(1, 1, 3)] * 2)
    assert found.computing == found.sending == pytest.approx(1.5) and found.memory_bytes == 0
    assert correction([row(1000, 0, 1, -5)]).computing == LEAST
    # The best fit has a negative factor for sending.
    absurd = correction([row(1, 0.01, 1.2), row(1, 0.02, 1)])
    assert absurd.computing == absurd.sending > 0


def test_corrected_profiles_predict_the_measurements(tmp_path: Path) -> None:
    """The true machine computes 1.4 times and sends 2 times as long, and needs 50 MB more.

    One round corrects all three.
    """
    hardware, model = profiles()
    truth = Correction(1.4, 2.0, 50_000_000, 1).of(hardware, model)
    done = [Measured(((p.seconds,),), (round(p.memory_bytes),)) for p in prices(*truth)]
    rows = [measured_row(p, one) for p, one in zip(prices(hardware, model), done, strict=True)]
    found = correction(rows)
    better = found.of(hardware, model)
    for record, name in zip(better, ("hardware.json", "model.json"), strict=True):
        record.save(tmp_path / name)
    read = Hardware.read(tmp_path / "hardware.json"), ModelProfile.read(tmp_path / "model.json")
    after = accuracy([measured_row(p, one) for p, one in zip(prices(*read), done, strict=True)])
    assert accuracy(rows)["time_error"]["mean"] > 0.25 and after["time_error"]["mean"] < 0.02
    assert after["memory_error"]["largest"] < 1e-6
    assert "from 6 plans" in read[0].measured["corrected"] and "corrected" in read[1].measured
    assert prices(*read)[0].memory[0].reserved == 50_000_000
