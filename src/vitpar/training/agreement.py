"""Comparison of all ranks before a model is built: they must train the same thing.

A launcher starts the command on every machine, where files, packages and command lines may differ. Ranks that draw
other samples or take another batch would train another model than the recipe says, without an error.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping

import torch

from vitpar.data.stream.stream_set import ImageSet
from vitpar.errors import RecipeError
from vitpar.launch.world_group import all_gather_json
from vitpar.recipe import Recipe
from vitpar.strategy import Plan
from vitpar.strategy.plan_json import plan_text
from vitpar.text import ranks, shown

LOCAL = ("data.path", "data.workers", "model.weights", "distill.teacher")
"""Settings that may differ between machines: the content of the files is compared instead of their paths."""


def refuse_disagreement(
    recipe: Recipe,
    plan: Plan,
    data: Mapping[str, ImageSet | None],
    others: Mapping[str, str | None],
) -> None:
    """Raise RecipeError on all ranks, with the name and values of what differs, unless all would compute the same.

    Collective: one message of a digest per rank.

    recipe: with its precision resolved.
    plan: with known degrees.
    data: data sets that are read, by name; None for one that does not exist.
    others: further facts by name.
    """
    facts: dict[str, object] = {key: value for key, value in recipe.flat().items() if key not in LOCAL}
    for name, images in data.items():
        if images is not None:
            classes = hashlib.sha256(json.dumps(images.names_of_classes).encode()).hexdigest()
            facts |= {f"the content of {name}": images.fingerprint, f"the classes of {name}": classes}
    # The package itself stands above its parts, which do not import it.
    versions = {"vitpar's version": sys.modules["vitpar"].__version__, "torch's version": torch.__version__}
    facts |= {"the plan": plan_text(plan), **versions, **others}
    mine = {name: json.dumps(value) for name, value in facts.items()}
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()
    if len({*all_gather_json(digest)}) == 1:
        return
    everyone: list[dict[str, str]] = all_gather_json(mine)
    for name in dict.fromkeys(name for one in everyone for name in one):
        groups: dict[str, list[int]] = {}
        for rank, one in enumerate(everyone):
            groups.setdefault(one.get(name, "missing"), []).append(rank)
        if len(groups) > 1:
            values = " and ".join(f"{shown(value)} on {ranks(where)}" for value, where in groups.items())
            raise RecipeError(
                f"ranks disagree: {name} is {values}: give all ranks the same command, recipe, data and packages"
            )
