"""Settings reference, generated from the fields of the recipe sections."""

import json

import pytest
from typer.testing import CliRunner

from helpers.paths import ROOT
from vitpar.errors import RecipeError
from vitpar.training.recipe import DEFAULT_RECIPE, Recipe, read_recipe
from vitpar.training.recipe.reference import find, markdown, settings
from vitpar_cli.main import app


def test_every_setting_has_a_description() -> None:
    every = {one.key: one for one in settings()}
    values = read_recipe(DEFAULT_RECIPE).model_dump()
    assert set(every) >= {f"{section}.{name}" for section, found in values.items() for name in found}
    assert len(every) == sum(len(field.annotation.model_fields) for field in Recipe.model_fields.values())  # type: ignore
    for one in every.values():
        assert one.effect.endswith(".") and one.kind and one.default, one.key


def test_docs_page_is_up_to_date() -> None:
    assert (ROOT / "docs/settings.md").read_text() == markdown(), "write it with `make docs`"


def test_types_and_defaults_are_spelled_out() -> None:
    expected = {
        "train.batch_size": ("integer from 1", "128"),
        "model.pool": ('"cls", "avg" or "map"', "unset"),
        "optimizer.betas": ("2 numbers", "[0.9, 0.999]"),
        "loss_scale.max_scale": ("number above 0", "16777216.0"),
        "augment.color_jitter": ("number or 3 numbers", "0.0"),
        "parallel.fallback_meshes": ("list of strings, 32 at most", "[]"),
        "data.flip": ("number from 0 to 1", "0.5"),
        "stream.train": ("string or list of strings", "unset"),
        "checkpoint.first": ("true or false", "false"),
    }
    assert {key: (one.kind, one.default) for key in expected for one in find(key)} == expected


def test_find_accepts_sections_and_bare_names() -> None:
    assert [one.key for one in find("microbatches")] == ["parallel.microbatches"]
    assert {one.key.partition(".")[0] for one in find("train")} == {"train"}  # not stream.train
    with pytest.raises(
        RecipeError, match=r"^unknown setting 'train\.batchsize' \(did you mean 'train\.batch_size'\?\): "
    ):
        find("train.batchsize")


def test_settings_command_prints_one_section_or_all() -> None:
    some = CliRunner().invoke(app, ["settings", "lr_schedule"])
    assert some.exit_code == 0 and "lr_schedule.min_lr" in some.stdout and "[lr_schedule]" in some.stdout
    assert "train.batch_size" not in some.stdout
    every = json.loads(CliRunner().invoke(app, ["settings", "--json"]).stdout)
    assert [one["key"] for one in every] == [one.key for one in settings()]
