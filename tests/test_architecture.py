"""Imports between packages go downwards only, and the pages of docs/ that come from the source match it."""

import re

import pytest

from helpers.paths import ROOT
from pages import architecture
from write_pages import PAGES


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


@pytest.mark.parametrize("name", PAGES)
def test_page_is_up_to_date(name: str) -> None:
    assert (ROOT / "docs" / f"{name}.md").read_text() == PAGES[name](), "write it with `make docs`"
