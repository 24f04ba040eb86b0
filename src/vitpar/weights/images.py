"""How a model's images are prepared and what its classes are called, in the files next to the tensors.

transformers writes preprocessor_config.json and `id2label`, timm `pretrained_cfg` and `label_names`.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from vitpar.checkpoint.index import RECIPE, read_class_names
from vitpar.data.classes import check_class_names
from vitpar.data.transforms import PILLOW_KERNELS, CropMode
from vitpar.errors import DataError
from vitpar.io import read_text
from vitpar.limits import MAX_MEASURE, MAX_TOML_BYTES
from vitpar.models.config import field_names
from vitpar.models.vit.exports import labels
from vitpar.text import literal
from vitpar.weights.folder import Weights

IMAGENET: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
"""Normalisation by the statistics of ImageNet."""
HALF: dict[str, Any] = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
"""Normalisation to [-1, 1]."""
PREPROCESSOR = "preprocessor_config.json"
_SQUARE = ("vit", "vit_mae", "deit", "swin", "dinov3_vit", "siglip", "siglip_vision_model")
"""Types of transformers' models whose processors read a single number as `size` as height and width."""
_CROPPED = ("deit", "dinov2", "dinov2_with_registers")
"""Types of transformers' models whose processors crop the centre unless their file says otherwise."""


@dataclass(frozen=True)
class ImageHints:
    """Settings of images in the files next to the tensors."""

    data: Mapping[str, Any] | None = None
    """Settings of a recipe's section [data]; None if they say nothing."""
    class_names: tuple[str, ...] | None = None
    """Names of the classes, in label order."""
    notes: tuple[str, ...] = ()
    """Settings that are not taken over, a sentence each."""


def read_image_hints(configs: Mapping[str, Mapping[str, Any]]) -> ImageHints:
    """Return what the JSON files say on images. configs: content of the files, by file name."""
    config = configs.get("config.json", {})
    if "model_type" in config:
        return _of_transformers(config, configs.get(PREPROCESSOR, {}))
    return _of_timm(config) if "architecture" in config else ImageHints()


def _of_transformers(config: Mapping[str, Any], images: Mapping[str, Any]) -> ImageHints:
    kind = config["model_type"]
    half = kind == "vit" or "siglip" in str(kind)
    data = dict(HALF if half else IMAGENET) | _colours(images.get("image_mean"), images.get("image_std"))
    if images.get("do_normalize") is False:
        data |= {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    resample, notes = images.get("resample", 2 if kind == "vit" else 3), list[str]()
    if isinstance(resample, int) and 0 <= resample < len(PILLOW_KERNELS):
        data["interpolation"] = PILLOW_KERNELS[resample]
    else:
        notes.append(f"preprocessor_config.json has resample {literal(resample)}: recipe.toml resizes bicubically")
    return ImageHints(data | _crop_of_transformers(kind, images), _class_names(config.get("id2label")), tuple(notes))


def _crop_of_transformers(kind: str, images: Mapping[str, Any]) -> dict[str, Any]:
    """Return crop_mode and crop_pct of a model of type `kind` by the content of its preprocessor_config.json.

    A `size` of height and width squashes the image; one of the shortest edge keeps its ratio. The crop follows.
    """
    size, crop = images.get("size"), images.get("crop_size")
    squashed = kind in _SQUARE
    if isinstance(size, dict):
        squashed = "shortest_edge" not in size
        size = size.get("shortest_edge") or size.get("height")
    if isinstance(crop, dict):
        crop = crop.get("height")
    fields: dict[str, Any] = {"crop_mode": "squash" if squashed else "center", "crop_pct": 1.0}
    if images.get("do_center_crop", kind in _CROPPED):
        size, crop = _pixels(size) or 256, _pixels(crop) or 224
        pct = min(1.0, crop / size)
        # The transform rounds crop / pct down, which must give `size` again.
        fields["crop_pct"] = pct if math.floor(crop / pct) == max(size, crop) else math.nextafter(pct, 0)
    return fields


def _pixels(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _of_timm(config: Mapping[str, Any]) -> ImageHints:
    said = config.get("pretrained_cfg")
    said = {**config, **(said if isinstance(said, dict) else {})}
    data, notes = dict(HALF) | _colours(said.get("mean"), said.get("std")), list[str]()
    for name, known_words in (("interpolation", PILLOW_KERNELS), ("crop_mode", get_args(CropMode))):
        if (word := said.get(name)) in known_words:
            data[name] = word
        elif word is not None:
            notes.append(
                f"config.json has {name} {literal(word)}, which evaluation lacks: recipe.toml uses the default"
            )
    crop = said.get("crop_pct")
    if isinstance(crop, int | float) and 0 < crop <= 1:
        data["crop_pct"] = float(crop)
    return ImageHints(data, _class_names(config.get("label_names")), tuple(notes))


def _colours(mean: Any, std: Any) -> dict[str, tuple[float, ...]]:
    return {
        name: tuple(map(float, value))
        for name, value in (("mean", mean), ("std", std))
        if isinstance(value, list | tuple)
        and len(value) == 3
        and all(isinstance(number, int | float) and abs(number) <= MAX_MEASURE for number in value)
    }


def _class_names(said: Any) -> tuple[str, ...] | None:
    """Return the names of classes 0, 1, …, from a list or from a table by number; None if `said` is neither.

    transformers writes LABEL_0, LABEL_1, … for classes without names. Names may repeat: ImageNet has two cranes.

    Raises DataError as `check_class_names` does.
    """
    if isinstance(said, dict) and all(str(label) in said for label in range(len(said))):
        said = [said[str(label)] for label in range(len(said))]
    usable = isinstance(said, list) and said and all(isinstance(name, str) for name in said)
    if not usable or said == [f"LABEL_{label}" for label in range(len(said))]:
        return None
    check_class_names([*dict.fromkeys(said)])
    return tuple(said)


def image_settings(weights: Weights) -> dict[str, Any]:
    """Return what a user of the model must know, by timm's names: its input, how images are prepared, and its classes.

    mean, std, interpolation, crop_pct and crop_mode are those of the folder's recipe. Without names of the classes,
    label_names is missing.
    """
    try:
        recipe = tomllib.loads(read_text(weights.folder / RECIPE, MAX_TOML_BYTES))
    except (OSError, ValueError) as error:
        raise DataError(f"{RECIPE} in '{weights.folder}' cannot be read: {error}") from None
    said, c = recipe.get("data"), weights.config
    usual = {**IMAGENET, "interpolation": "bicubic", "crop_pct": 0.875, "crop_mode": "center"}
    given = {name: value for name, value in (said if isinstance(said, dict) else {}).items() if name in usual}
    classes = c.num_classes if "num_classes" in field_names(type(c)) else 0
    names = read_class_names(weights.folder, classes) if classes else None
    size = [c.channels, c.image_size, c.image_size]
    settings = {"num_classes": classes, "input_size": size, **usual, **given}
    return settings | ({} if names is None else {"label_names": names})


def image_files(config: Mapping[str, Any], images: dict[str, Any], size: int, format_name: str) -> dict[str, str]:
    """Return the content of the JSON files of a model of images, by file name.

    config: content of config.json without what is known of images.
    images: as of `image_settings`.
    size: height and width of images in pixels.

    Raises DataError for a crop that the library lacks.
    """
    names = images.pop("label_names", None)
    if format_name == "timm":
        pretrained = {**images, "fixed_input_size": True, "first_conv": "patch_embed.proj", "classifier": "head"}
        said = {} if names is None else {"label_names": names}
        return {"config.json": json.dumps({**config, **said, "pretrained_cfg": pretrained}, indent=1)}
    if images["crop_mode"] == "border":
        raise DataError("data.crop_mode is 'border', which transformers lacks: use --format timm or vitpar")
    side = math.floor(size / images["crop_pct"])
    squashed = images["crop_mode"] == "squash"
    processor = {
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"height": side, "width": side} if squashed else {"shortest_edge": side},
        "resample": PILLOW_KERNELS.index(images["interpolation"]),
        "do_center_crop": True,
        "crop_size": {"height": size, "width": size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": images["mean"],
        "image_std": images["std"],
    }
    said = {} if names is None or "id2label" not in config else labels(names)
    return {
        "config.json": json.dumps({**config, **said, "dtype": "float32"}, indent=1),
        PREPROCESSOR: json.dumps(processor, indent=1),
    }
