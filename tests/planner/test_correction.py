"""Corrections of profiles from measured plans."""

from pathlib import Path

import pytest

from vitpar.models import model_config
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import Price, price
from vitpar.planner.measure.steps import Measured, PlanSteps
from vitpar.planner.profile.cluster import find_cluster
from vitpar.planner.profile.estimate import estimate_model, tensors
from vitpar.planner.profile.profiles import Hardware, ModelProfile
from vitpar.planner.report.accuracy import LEAST, AccuracyRow, Correction, accuracy, correction
from vitpar.strategy import parse, validate

CONFIG = model_config("vit_custom", embed_dim=256, depth=4, num_heads=4, patch_size=8, image_size=64, num_classes=10)
PLANS = ("dp4", "fsdp4", "tp4", "dp2xtp2", "tp4+sp", "dp4+zero1")


def profiles() -> tuple[Hardware, ModelProfile]:
    hardware = find_cluster("4xA100").hardware()
    return hardware, estimate_model(CONFIG, "fp32", hardware, tensors(CONFIG, 4))


def prices(hardware: Hardware, model: ModelProfile) -> list[Price]:
    costs = LayerCosts(CONFIG, hardware, model)
    return [price(validate(parse(words), CONFIG, 32), costs, 32) for words in PLANS]


def test_correction_recovers_known_factors() -> None:
    """The steps take 1.5 times the predicted computing and 0.8 times the predicted sending."""
    parts = [(1.0, 0.1), (2.0, 1.0), (1.0, 3.0), (4.0, 0.0)]
    found = correction([(c / (1.5 * c + 0.8 * s), s / (1.5 * c + 0.8 * s)) for c, s in parts], [30.0] * 4)
    assert found.computing == pytest.approx(1.5) and found.sending == pytest.approx(0.8)
    assert found.memory_bytes == 30 and found.plans == 4


def test_indistinguishable_plans_get_one_common_factor() -> None:
    found = correction([(1 / 3, 1 / 3)] * 2, [])
    assert found.computing == found.sending == pytest.approx(1.5) and found.memory_bytes == 0
    assert correction([(1000.0, 0.0)], [-5.0]).computing == LEAST
    # The best fit has a negative factor for sending.
    absurd = correction([(1 / 1.2, 0.01 / 1.2), (1.0, 0.02)], [])
    assert absurd.computing == absurd.sending > 0


def test_corrected_profiles_predict_the_measurements(tmp_path: Path) -> None:
    """The true machine computes 1.4 times and sends 2 times as long, and needs 50 MB more.

    One round corrects all three.
    """
    hardware, model = profiles()
    truth = Correction(1.4, 2.0, 50_000_000, 1).of(hardware, model)
    rows = [
        AccuracyRow(predicted, Measured((PlanSteps((true.seconds,)),), (round(true.memory_bytes),)))
        for predicted, true in zip(prices(hardware, model), prices(*truth), strict=True)
    ]
    found = correction([row.parts for row in rows], [(row.memory or 0) - row.price.memory_bytes for row in rows])
    better = found.of(hardware, model)
    for record, name in zip(better, ("hardware.json", "model.json"), strict=True):
        record.save(tmp_path / name)
    read = Hardware.read(tmp_path / "hardware.json"), ModelProfile.read(tmp_path / "model.json")
    after = [AccuracyRow(p, row.measured) for p, row in zip(prices(*read), rows, strict=True)]
    memory = accuracy(after).memory
    assert accuracy(rows).time[0] > 0.25 and accuracy(after).time[0] < 0.02
    assert memory is not None and memory[1] < 1e-6
    assert "from 6 plans" in read[0].measured["corrected"] and "corrected" in read[1].measured
    assert prices(*read)[0].memory[0].reserved == 50_000_000
