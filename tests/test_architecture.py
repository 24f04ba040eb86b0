"""Imports between packages go downwards only, and docs/architecture.md matches the source."""

import re

import pytest

import architecture
from helpers.paths import ROOT


def test_no_import_goes_upwards_or_in_a_cycle() -> None:
    graph = architecture.imports(architecture.modules())
    assert sum(map(len, graph.values())) > 1000, "imports are found"
    assert architecture.upwards(graph) == []
    assert architecture.cycles(graph) == []


def test_only_models_know_the_configurations_of_families() -> None:
    for name, path in architecture.modules().items():
        if name != "vitpar" and not f"{name}.".startswith("vitpar.models."):
            assert not re.search(r"\b(ViT|Swin)Config\b", path.read_text()), f"{name}: ask the ModelConfig instead"


@pytest.mark.parametrize(
    ("graph", "found"),
    [
        ({"vitpar.models.vit": {"vitpar.parallel.model"}, "vitpar.parallel.model": set()}, 1),
        ({"vitpar.parallel.model": {"vitpar.data"}, "vitpar.data": set()}, 1),
        ({"vitpar.training.optim.optimizer": {"vitpar.training.trainer"}, "vitpar.training.trainer": set()}, 1),
        ({"vitpar.parallel.model": {"vitpar.models.vit", "vitpar.parallel.tensor"}, "vitpar.models.vit": set()}, 0),
    ],
    ids=["up", "beside", "within training", "down"],
)
def test_upward_imports_are_found(graph: dict[str, set[str]], found: int) -> None:
    assert len(architecture.upwards(graph)) == found


def test_import_cycles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}
    assert architecture.cycles(graph) == ["a imports b imports c imports a"]


def test_architecture_page_is_up_to_date() -> None:
    assert (ROOT / "docs/architecture.md").read_text() == architecture.page(), "write it with `make docs`"


def test_walks_name_existing_files_and_symbols() -> None:
    assert architecture.lost() == []
    steps = (("strategy/plan.py", "Plan", ""), ("strategy/plan.py", "Plam", ""), ("strategy/plain.py", "Plan", ""))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(architecture, "WALKS", {"far": (2, steps)})
        assert len(architecture.lost()) == 3, "too long, no such name, no such file"
