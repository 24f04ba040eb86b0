"""Target: recipes, and settings of the command line."""

import typing
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fuzzing import oracle
from fuzzing.case import Case, Draw, Target
from fuzzing.edits import WORDS, pick, words
from fuzzing.oracle import tolerated
from fuzzing.readers.plans import url
from helpers.paths import ROOT
from vitpar.data import parse_policy
from vitpar.training.recipe import Recipe
from vitpar.training.recipe.file import DEFAULT_RECIPE, read_data_section, read_recipe

KEYS = tuple(
    f"{section}.{name}"
    for section, field in Recipe.model_fields.items()
    for name in typing.cast(Any, field.annotation).model_fields
)


@st.composite
def settings(draw: Draw) -> list[str]:
    """Return values of --set, mostly none."""
    found = []
    for _ in range(pick(draw, (0, 0, 1, 2, 8))):
        key, value = pick(draw, KEYS), pick(draw, WORDS["toml"]["values"])
        if "mesh" in key or key == "augment.policy":
            value = f'"{words(draw, "strategy" if "mesh" in key else "policy")}"'
        elif key in ("stream.train", "stream.val"):
            value = f'"{url(draw)}"'
        found.append(
            pick(draw, ("{}={}", "{}={}", "{} = {}", "{}{}", "{}.x={}")).replace("{}", key, 1).replace("{}", value)
        )
    return found


class RecipeFile(Target):
    """A recipe in TOML, in some cases with `--set`."""

    about = "recipes in TOML, and --set values"
    argument = settings()

    def make(self, home: Path) -> None:
        paths = (
            DEFAULT_RECIPE,
            ROOT / "experiments/fuzzing/seeds/stream.toml",
            *sorted((ROOT / "experiments").glob("*.toml")),
        )
        texts = [path.read_bytes() for path in paths]
        texts = [text for text in texts if b"[data]" in text or b"[stream]" in text]
        self.seeds = [{"recipe.toml": text} for text in (*texts, read_recipe(DEFAULT_RECIPE).to_toml().encode())]
        lines = [f"{line}\n".encode() + texts[0] for line in WORDS["toml"]["lines"]]
        values = [b"[model]\ndepth = " + value.encode() for value in WORDS["toml"]["values"]]
        self.triggers = [self.case(0, {"recipe.toml": text}) for text in (*lines, *values)]

    def read(self, case: Case, place: Path) -> None:
        path = place / "recipe.toml"
        tolerated(lambda: read_data_section(path))
        recipe = read_recipe(path, {}, case.argument or ())
        again = place / "again.toml"
        again.write_text(recipe.to_toml(), encoding="utf-8")
        read = tolerated(lambda: read_recipe(again))
        if read != recipe:
            one, other = recipe.model_dump(), read.model_dump() if read else {}
            found = [f"{key}: {one[key]!r:.300} {other.get(key)!r:.300}" for key in one if one[key] != other.get(key)]
            raise oracle.Wrong("\n".join(["the recipe that it writes is read as another", *found]))
        config = tolerated(lambda: recipe.config(10))
        if config is not None:
            tolerated(lambda: recipe.plan(config))
        tolerated(recipe.requested_plans)
        if recipe.augment.policy is not None:
            tolerated(lambda: parse_policy(recipe.augment.policy))
        tolerated(lambda: (recipe.total_steps(1_000), recipe.warmup_steps(1_000)))
