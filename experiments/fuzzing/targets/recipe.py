"""Target: recipes, and settings of the command line."""

from __future__ import annotations

import random
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fuzzing import oracle
from fuzzing.attacks.strategies import strategy
from fuzzing.attacks.tomls import TOML_VALUES, toml_attack
from fuzzing.attacks.words import policy, url
from fuzzing.process import EXPERIMENTS
from fuzzing.target import Case, Files, FileTarget, tolerated
from vitpar.data import parse_policy
from vitpar.training.recipe import Recipe
from vitpar.training.recipe.file import DEFAULT_RECIPE, read_data_section, read_recipe

STREAM = """
[model]
name = "vit_tiny_patch16_224"
[stream]
train = "https://host/train-{000..127}.tar"
val = ["a.tar", "b.tar"]
samples = 10
val_samples = 10
classes = 3
label = "json:label"
[train]
epochs = 3
precision = "bf16"
[parallel]
mesh = "pp2: embed=fsdp4, *=tp2xfsdp2+ckpt"
fallback_meshes = ["dp2", "dp1"]
"""
KEYS = tuple(
    f"{section}.{name}"
    for section, field in Recipe.model_fields.items()
    for name in typing.cast(Any, field.annotation).model_fields
)


class RecipeFile(FileTarget):
    """A recipe in TOML, in some cases with `--set`."""

    what = "recipes in TOML, and --set values"
    tokens = (
        b"=",
        b"[",
        b"]",
        b"[[",
        b'"',
        b"'",
        b"{",
        b"}",
        b".",
        b"\n",
        b"nan",
        b"-1",
        b"1e999",
        b"true",
        b'"""',
        b"#",
        b"\\u0000",
    )

    def __init__(self, home: Path) -> None:
        recipes = [DEFAULT_RECIPE, *sorted(EXPERIMENTS.glob("*.toml"))]
        texts = [
            path.read_bytes() for path in recipes if b"[data]" in path.read_bytes() or b"[stream]" in path.read_bytes()
        ]
        self.seeds = [{"recipe.toml": text} for text in (*texts, STREAM.encode())]
        self.seeds.append({"recipe.toml": read_recipe(DEFAULT_RECIPE).to_toml().encode()})
        self.attacks = (_lines, _lines, _lines, _drawn)

    def make(self, draw: random.Random, number: int, place: Path) -> Case:
        case = super().make(draw, number, place)
        if case.changed and draw.random() < 0.3:
            case.told = [_assignment(draw) for _ in range(draw.choice((1, 1, 2, 5)))]
            case.how += f" --set {' --set '.join(case.told):.150}"
        return case

    def read(self, case: Case) -> None:
        path = case.place / "recipe.toml"
        tolerated(lambda: read_data_section(path))
        recipe = read_recipe(path, {}, case.told or ())
        again = case.place / "again.toml"
        again.write_text(recipe.to_toml(), encoding="utf-8")
        read = tolerated(lambda: read_recipe(again)) or "a refusal"
        if read != recipe:
            raise oracle.Wrong(f"what it writes reads back as something else\n{_difference(recipe, read)}")
        config = tolerated(lambda: recipe.config(10))
        if config is not None:
            tolerated(lambda: recipe.plan(config))
        tolerated(recipe.requested_plans)
        if recipe.augment.policy is not None:
            tolerated(lambda: parse_policy(recipe.augment.policy))
        tolerated(lambda: (recipe.total_steps(1_000), recipe.warmup_steps(1_000)))


def _difference(recipe: Recipe, read: Any) -> str:
    if not isinstance(read, Recipe):
        return str(read)
    one, other = recipe.model_dump(), read.model_dump()
    found = [f"{key}: {one[key]!r:.300} {other[key]!r:.300}" for key in one if one[key] != other[key]]
    return "\n".join(found)


def _settings(draw: random.Random) -> Iterator[tuple[str, str]]:
    """Yield keys of a recipe and values, some of which fit the key."""
    for key in draw.sample(KEYS, draw.choice((1, 1, 2, 3, 8))):
        made = {"parallel.mesh": strategy, "augment.policy": policy, "stream.train": url, "stream.val": url}
        if key in made and draw.random() < 0.8:
            yield key, f'"{made[key](draw)}"'.replace("\\", "/")
        else:
            yield key, draw.choice(TOML_VALUES)


def _assignment(draw: random.Random) -> str:
    key, value = next(_settings(draw))
    return draw.choice(
        (f"{key}={value}", f"{key}={value}", f"{key} = {value}", f"{key}{value}", f"{key}.x={value}", f"={value}")
    )


def _lines(draw: random.Random, files: Files) -> str:
    content = files["recipe.toml"]
    assert isinstance(content, bytes)
    words = [f"{key.partition('.')[2]} = {value}" for key, value in _settings(draw)]
    files["recipe.toml"], done = toml_attack(draw, content, words)
    return done


def _drawn(draw: random.Random, files: Files) -> str:
    """Write a recipe of random settings."""
    sections: dict[str, list[str]] = {"data": ['path = "x"'], "train": ["steps = 3"]}
    for key, value in _settings(draw):
        section, _, name = key.partition(".")
        sections.setdefault(section, []).append(f"{name} = {value}")
    if "stream" in sections and draw.random() < 0.7:
        del sections["data"]
    text = "\n".join(f"[{section}]\n" + "\n".join(lines) for section, lines in sections.items())
    files["recipe.toml"] = text.encode("utf-8", "surrogatepass")
    return "drawn settings"
