"""Target: recipes, and settings of the command line."""

import typing
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fuzzing import oracle
from fuzzing.case import Case, Target
from fuzzing.hostile import WORDS
from fuzzing.oracle import tolerated
from fuzzing.readers.plans import STRATEGIES
from fuzzing.readers.profiles import SEEDS
from vitpar.data import parse_policy
from vitpar.training import recipe
from vitpar.training.recipe.file import DEFAULT_RECIPE, read_recipe, read_section
from vitpar.training.recipe.sections import DataSection

KEYS = tuple(
    f"{section}.{name}"
    for section, field in recipe.Recipe.model_fields.items()
    for name in typing.cast(Any, field.annotation).model_fields
)


SET = st.builds(
    "{}{}{}".format,
    st.sampled_from(KEYS),
    st.sampled_from(("=", "=", "=", " = ", "", ".x=")),
    st.sampled_from((*WORDS["toml"]["values"], *(f'"{word}"' for word in WORDS["words"]["policy"]))),
)
SETTINGS = st.lists(SET | st.builds('parallel.mesh="{}"'.format, STRATEGIES), max_size=8)
"""Values of --set."""


class Recipe(Target):
    """Recipes in TOML, in some cases with `--set`."""

    argument = st.just(()) | SETTINGS

    def make(self, home: Path) -> None:
        texts = [path.read_bytes() for path in (DEFAULT_RECIPE, SEEDS / "stream.toml")]
        self.seeds = [{"recipe.toml": text} for text in (*texts, read_recipe(DEFAULT_RECIPE).to_toml().encode())]
        lines = [f"{line}\n".encode() + texts[0] for line in WORDS["toml"]["lines"]]
        values = [b"[model]\ndepth = " + value.encode() for value in WORDS["toml"]["values"]]
        self.triggers = [self.case(0, {"recipe.toml": text}) for text in (*lines, *values)]

    def read(self, case: Case, place: Path) -> None:
        path = place / "recipe.toml"
        tolerated(lambda: read_section(path, "data", DataSection))
        found = read_recipe(path, {}, case.argument or ())
        again = place / "again.toml"
        again.write_text(found.to_toml(), encoding="utf-8")
        read = tolerated(lambda: read_recipe(again))
        if read != found:
            raise oracle.Wrong(f"the recipe that it writes is read as another:\n{found}\n{read}")
        config = tolerated(lambda: found.config(10))
        if config is not None:
            tolerated(lambda: found.plan(config))
        tolerated(found.requested_plans)
        if found.augment.policy is not None:
            tolerated(lambda: parse_policy(found.augment.policy))
        tolerated(lambda: (found.total_steps(1_000), found.learning_rate(1_000)(1)))
