"""Reading of recipes: a TOML file, then command-line options, then ``--set section.key=value``; later ones win."""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from vitpar.errors import RecipeError
from vitpar.io import parse_toml, read_toml
from vitpar.limits import MAX_TOML_BYTES
from vitpar.models.config import field_names
from vitpar.models.families import FAMILIES
from vitpar.recipe.effects import OF_CLASSES, OF_IMAGES
from vitpar.recipe.recipe import Recipe
from vitpar.recipe.reference import ABSENT, OTHER_NAMES
from vitpar.recipe.sections import Section
from vitpar.recipe.sections.input import CLASSIFY, TEXT
from vitpar.text import literal, nearest, shown

S = TypeVar("S", bound=Section)

# Alternative settings of one thing: a later source that gives one of them replaces the other.
_ALTERNATIVES = (
    ("train", "epochs", "steps"),
    ("data", "crop_padding", "crop_scale"),
    ("data", "crop_padding", "crop_ratio"),
    ("parallel", "microbatches", "microbatch_size"),
)
_SIZES = (
    *("image_size", "patch_size", "embed_dim", "depth", "depths", "num_heads"),
    *("window_size", "mlp_ratio", "mlp_hidden_dim", "vocab_size", "tokens", "positions", "token_types"),
    *("decoder_depth", "decoder_tokens", "head_dim", "num_buckets", "max_distance", "tied"),
)
"""Settings of [model] that another model replaces by its own."""
SECTIONS: dict[str, type[BaseModel]] = {name: type(field.default) for name, field in Recipe.model_fields.items()}
SHIPPED = Path(__file__).parents[1] / "recipes"
"""Folder of the shipped recipes, which can be named without folder and suffix."""
ABOUT = "about"
"""Section of a recipe file that describes it (`About`) and sets nothing."""
DEFAULT_RECIPE = SHIPPED / "digits.toml"
"""Recipe that is used when neither a recipe nor data is named."""


def read_recipe(
    path: Path | str | None,
    options: Mapping[str, object] | None = None,
    assignments: Iterable[str] = (),
    *,
    without: Collection[str] = (),
    needs_length: bool = True,
) -> Recipe:
    """Read a recipe: the TOML file `path`, then `options`, then `assignments`.

    path: file, or name of a shipped recipe; None for the defaults.
    options: values by dotted key. Those that are None are left out.
    assignments: ``section.key=value``.
    without: sections of the file to leave out.
    needs_length: whether epochs or steps have to be given.

    A later model.name, if it differs from the file's, brings its own sizes, and drops what it does not have. A later
    task.name drops the file's label smoothing and mixing of images, and all settings of images if it is a task of text.
    A later train.precision drops the file's train.reduce_dtype and [loss_scale].

    Raises RecipeError that names the key, its value and the fix.
    """
    values = _read_toml(Path(path)) if path is not None else {}
    values = {section: settings for section, settings in values.items() if section not in without}
    _refuse_unknown(values)
    _check_alternatives({f"{s}.{k}" for s, section in values.items() if isinstance(section, dict) for k in section})
    given = {key: value for key, value in (options or {}).items() if value is not None}
    assigned = dict[str, Any]()
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise RecipeError(
                f"'{shown(assignment)}' is not an assignment: write --set section.key=value, as in --set train.seed=1"
            )
        try:
            assigned[key.strip()] = parse_toml(f"value = {text.strip()}")["value"]
        except ValueError:  # text without quotes
            assigned[key.strip()] = text.strip()
    for source in (given, assigned):
        _check_alternatives(source)
    changes = [*given.items(), *assigned.items()]
    # These come first, since they clear settings of the file.
    for key, value in sorted(changes, key=lambda item: item[0] not in ("task.name", "model.name", "train.precision")):
        section, dot, name = key.partition(".")
        if not dot:
            near = "" if key in SECTIONS else _nearest_key(f".{key}" if key not in {*OTHER_NAMES, *ABSENT} else key)
            raise RecipeError(f"'{shown(key)}' is not a setting{near or ': use section.key, as in train.seed'}")
        _refuse_unwritable(key, value)
        values.setdefault(section, {})
        for group, *ways in _ALTERNATIVES:
            if section == group and name in ways:
                values[section] = {k: v for k, v in values[section].items() if k not in ways}
        if key == "data.path":
            values.pop("stream", None)
        if section == "stream":
            values.get("data", {}).pop("path", None)
        if key == "model.name" and value != values["model"].get("name"):
            # Another model brings its own sizes; the file keeps other settings that it has (pooling, drop-path, …).
            family = next((kind for kind in FAMILIES.values() if kind.knows(str(value))), None)
            fields = {*values["model"]} if family is None else {*field_names(family), "weights", "options"}
            values["model"] = {k: v for k, v in values["model"].items() if k in fields and k not in _SIZES}
        if key == "task.name" and value not in (CLASSIFY, values["task"].get("name")):
            for setting in OF_IMAGES if value in TEXT else OF_CLASSES:
                part, _, known = setting.partition(".")
                values.get(part, {}).pop(known, None)
        if key == "train.precision" and value != values["train"].get("precision"):
            values["train"].pop("reduce_dtype", None)
            values.pop("loss_scale", None)
        if key.startswith(("model.options.", "task.options.")):
            inner = values[section].get("options")
            option = name.removeprefix("options.")
            values[section]["options"] = {**(inner if isinstance(inner, dict) else {}), option: value}
        else:
            values[section][name] = value
    _refuse_unknown(values)
    for section, settings in values.items():
        for name, value in settings.items():
            _refuse_unwritable(f"{section}.{name}", value)
    recipe = checked(values)
    written = len(recipe.to_toml().encode())
    if written > MAX_TOML_BYTES:  # a run would write a recipe.toml that cannot be read when it resumes
        raise RecipeError(
            f"the recipe has {written:,} bytes with all its settings, more than {MAX_TOML_BYTES:,}: shorten it"
        )
    if needs_length and recipe.train.epochs is None and recipe.train.steps is None:
        raise RecipeError("the recipe has neither train.epochs nor train.steps: give --epochs N or --steps N")
    return recipe


def checked(values: Mapping[str, object]) -> Recipe:
    """Return the recipe with `values`, by section and name. Raises RecipeError."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise RecipeError(_sentence(error)) from None


def read_section(path: Path, name: str, kind: type[S]) -> S:
    """Return a section of the recipe `path`, of the class `kind`, and ignore the others. Raises RecipeError."""
    try:
        section = _read_toml(path).get(name, {})
        _refuse_unknown({name: section})
        return kind.model_validate(section)
    except ValidationError as error:
        raise RecipeError(_sentence(error)) from None


def _read_toml(path: Path) -> dict[str, Any]:
    names = sorted(file.stem for file in SHIPPED.glob("*.toml"))
    if str(path) in names and not path.is_file():
        path = SHIPPED / f"{path}.toml"
    try:
        values = read_toml(path)
    except FileNotFoundError:
        raise RecipeError(
            f"no recipe '{path}'{nearest(str(path), names)}: name a TOML file, or a recipe that `vitpar recipes` lists"
        ) from None
    except OSError as error:
        raise RecipeError(f"the recipe '{shown(path)}' cannot be read: {error.strerror}: name another") from None
    except ValueError as error:
        raise RecipeError(f"the recipe '{path}' is not valid TOML: {shown(error)}: correct it") from None
    values.pop(ABOUT, None)
    return values


def _refuse_unwritable(key: str, value: object) -> None:
    """Refuse values that recipe.toml cannot hold: not UTF-8, or thousands of digits."""
    try:
        json.dumps({key: value}, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise RecipeError(f"{shown(key)} is '{shown(value)}', which is not UTF-8: write it in UTF-8") from None
    except ValueError:  # Python writes no integer of more than 4,300 digits
        raise RecipeError(f"{shown(key)} is a number of thousands of digits: write a smaller one") from None


def refuse_unknown_key(key: str) -> None:
    """Raise RecipeError if recipes have no such setting; of `model.options.NAME` only two parts are compared."""
    section, setting, *_ = (*key.split("."), "")
    _refuse_unknown({section: {setting: None}} if setting else {section: {}})


def _refuse_unknown(values: Mapping[str, object]) -> None:
    """Refuse the first section or setting that recipes do not have."""
    for section, settings in values.items():
        if section not in SECTIONS:
            raise RecipeError(f"unknown recipe key '{shown(section)}'{_nearest_key(section)}")
        if not isinstance(settings, dict):
            raise RecipeError(f"recipe key '{section}' is {literal(settings)}: write a table, [{section}]")
        unknown = next((key for key in settings if key not in SECTIONS[section].model_fields), None)
        if unknown is not None:
            key = f"{section}.{unknown}"
            raise RecipeError(f"unknown recipe key '{shown(key)}'{_nearest_key(key)}")


def _check_alternatives(keys: Collection[str]) -> None:
    """Refuse alternative settings of one thing in one source. keys: all dotted keys of the source."""
    for group, *ways in _ALTERNATIVES:
        given = [f"{group}.{way}" for way in ways if f"{group}.{way}" in keys]
        if len(given) > 1:
            raise RecipeError(f"both {given[0]} and {given[1]} are given: keep one")
    if "data.path" in keys and (streamed := next((key for key in keys if key.startswith("stream.")), None)):
        raise RecipeError(f"both data.path and {streamed} are given: keep one")


def _sentence(error: ValidationError) -> str:
    """Return the first error of pydantic as one sentence with the key, the value and the fix."""
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "value_error":  # raised by our validators, already a sentence
        sentence = str(first["ctx"]["error"])
        return sentence if len(first["loc"]) < 2 or key in sentence else f"{key}: {sentence}"
    return f"recipe key '{shown(key)}' is {literal(first['input'])}: {first['msg'][0].lower()}{first['msg'][1:]}"


def _nearest_key(key: str) -> str:
    name = key.partition(".")[2]
    if absent := ABSENT.get(name or key):
        return f": {absent}"
    if not name and key in OTHER_NAMES:
        return f" (did you mean '{OTHER_NAMES[key]}'?)"
    if not name:
        return nearest(key, SECTIONS) or f": sections are {', '.join(SECTIONS)}"
    keys = [f"{section}.{setting}" for section, fields in SECTIONS.items() for setting in fields.model_fields]
    elsewhere = [known for known in keys if known.endswith(f".{name}")]  # the right name in the wrong section
    elsewhere += [OTHER_NAMES[name]] if name in OTHER_NAMES else []
    if elsewhere:
        return f" (did you mean '{elsewhere[0]}'?)"
    ends = {known.partition(".")[2]: known for known in reversed(keys)} | OTHER_NAMES
    hint = re.sub("'(.*)'", lambda found: f"'{ends[found[1]]}'", nearest(name, ends))  # with the section of the name
    return hint or nearest(key, keys)


@dataclass(frozen=True)
class About:
    """Section [about] of a recipe file."""

    title: str
    """Model, data and length, in words."""
    source: str
    """Paper or code that the settings are from."""
    published: str
    """Result that the source reports; "none" if it reports none."""
    here: str
    """Parts that were run or tested with vitpar."""
    samples: int
    """Training samples of the data set."""


@dataclass(frozen=True)
class ShippedRecipe:
    """A recipe that can be named without folder and suffix."""

    name: str
    """Name, as in ``--recipe NAME``."""
    path: Path
    """The file."""
    about: About
    """Description."""

    def recipe(self) -> Recipe:
        """Return the recipe."""
        return read_recipe(self.path)


def shipped_recipes() -> list[ShippedRecipe]:
    """Return all shipped recipes, by name."""
    return [ShippedRecipe(path.stem, path, About(**read_toml(path)[ABOUT])) for path in sorted(SHIPPED.glob("*.toml"))]


def shipped_recipe(name: str) -> ShippedRecipe:
    """Return a shipped recipe. Raises RecipeError for an unknown name."""
    known = {one.name: one for one in shipped_recipes()}
    if name not in known:
        raise RecipeError(f"no shipped recipe '{shown(name)}'{nearest(name, known)}: `vitpar recipes` lists them")
    return known[name]
