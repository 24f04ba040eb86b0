"""Settings that a model's tensors do not tell, from the files next to them.

These files are config.json, as transformers, timm and vitpar write it, and preprocessor_config.json. Information that
contradicts the tensors is refused, because the shapes of the inferred model's parameters are compared with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from vitpar.data.classes import check_class_names
from vitpar.data.transforms.names import PILLOW_KERNELS, CropMode
from vitpar.errors import DataError
from vitpar.limits import MAX_MEASURE
from vitpar.models.vit.names import fields_of
from vitpar.text import literal

IMAGENET: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
"""Normalisation by the statistics of ImageNet."""
HALF: dict[str, Any] = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
"""Normalisation to [-1, 1]."""
_EPS = {
    **{"vit": 1e-12, "vit_mae": 1e-12, "deit": 1e-12, "swin": 1e-5},
    **{"dinov2": 1e-6, "dinov2_with_registers": 1e-6, "dinov3_vit": 1e-5, "siglip": 1e-6, "siglip_vision_model": 1e-6},
}
"""Epsilon of LayerNorms in transformers' models whose config.json does not give one, by type of model."""
_ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_GATES = {"gelu": "geglu", "silu": "swiglu"}
"""Activations by transformers' names: of plain MLPs, and of the gates of gated ones."""
_OF_TIMM = {
    "act_layer": ("gelu", "gelu_tanh"),
    "rope_type": ("cat", "dinov3"),
    "global_pool": ("token", "avg", "map"),
}
"""Words that an argument of timm's models may have here; no tensor shows them."""
_SQUARE = ("vit", "vit_mae", "deit", "swin", "dinov3_vit", "siglip", "siglip_vision_model")
"""Types of transformers' models whose processors read a single number as `size` as height and width."""
_CROPPED = ("deit", "dinov2", "dinov2_with_registers")
"""Types of transformers' models whose processors crop the centre unless their file says otherwise."""


@dataclass(frozen=True)
class Hints:
    """Settings from the files next to the tensors; None for those that they do not give."""

    heads: int | None = None
    """Number of attention heads."""
    pool: str | None = None
    """Pooling, "cls" or "avg"."""
    image_size: int | None = None
    """Height and width of images in pixels."""
    patch_size: int | None = None
    """Height and width of patches in pixels."""
    layer_scale: float | None = None
    """Initial layer scale."""
    norm_eps: float | None = None
    """Epsilon of LayerNorms."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a Vision Transformer that no tensor shows (``vitpar.models.vit.foreign.INVISIBLE``), by name."""
    decoder: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a masked autoencoder that no tensor shows, by name."""
    text: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a model of text that no tensor shows, by name."""
    data: Mapping[str, Any] | None = None
    """Settings of a recipe's section [data]."""
    class_names: tuple[str, ...] | None = None
    """Names of the classes, in label order."""
    notes: Sequence[str] = ()
    """Settings that are not taken over, a sentence each."""


def hints(configs: Mapping[str, Mapping[str, Any]]) -> Hints:
    """Return the hints in the JSON files next to the tensors.

    configs: content of the files, by file name.

    Raises DataError for a model that computes differently from vitpar's, and for an invalid epsilon.
    """
    config = configs.get("config.json", {})
    if "model_type" in config:
        return _transformers(config, configs.get("preprocessor_config.json", {}))
    if "architecture" in config:
        return _timm(config)
    pool = config.get("pool")
    return Hints(
        heads=_number(config.get("num_heads")),
        pool=pool if isinstance(pool, str) else None,
        image_size=_number(config.get("image_size")),
        patch_size=_number(config.get("patch_size")),
        layer_scale=_measure(config.get("layer_scale")),
        norm_eps=_measure(config.get("norm_eps")),
        fields=_fields(config),
        decoder=_decoder(config, "decoder_num_heads"),
        text={
            **{name: number for name in _COUNTS if (number := _number(config.get(name))) is not None},
            **({"tied": config["tied"]} if isinstance(config.get("tied"), bool) else {}),
            "dropout": _measure(config.get("dropout")) or 0.0,
        },
    )


_COUNTS = ("tokens", "decoder_tokens", "max_distance")


def _fields(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `said` that no tensor shows and that have the right type; others are left out."""
    words, numbers = ("position", "rope", "activation"), ("rope_temperature", "rope_register_temperature")
    fields: dict[str, Any] = {name: said[name] for name in words if isinstance(said.get(name), str)}
    fields |= {name: number for name in numbers if (number := _measure(said.get(name))) is not None}
    if (grid := _number(said.get("rope_grid"))) is not None:
        fields["rope_grid"] = grid
    return fields


def _transformers(config: Mapping[str, Any], images: Mapping[str, Any]) -> Hints:
    kind = config["model_type"]
    if kind in ("bert", "t5"):
        return _bert(config) if kind == "bert" else _t5(config)
    if not isinstance(kind, str) or kind not in _EPS:
        known_types = ", ".join((*_EPS, "bert", "t5"))
        raise DataError(f"config.json has model_type {literal(kind)}, but only {known_types} can be imported")
    tower = config.get("vision_config")
    config = {**config, **(tower if isinstance(tower, dict) else {})}
    activation = config.get("hidden_act", "gelu_pytorch_tanh" if "siglip" in kind else "gelu")
    known = _GATES if config.get("use_gated_mlp") else _ACTIVATIONS
    if not isinstance(activation, str) or activation not in known:
        raise DataError(
            f"config.json has hidden_act {literal(activation)}, but vitpar's models support only {', '.join(known)}"
        )
    eps = _measure(said := config.get("layer_norm_eps", _EPS[kind]))
    if eps is None:
        raise DataError(f"config.json has layer_norm_eps {literal(said)}, which is not a number: correct it")
    half = kind == "vit" or "siglip" in kind
    data = dict(HALF if half else IMAGENET) | _colours(images.get("image_mean"), images.get("image_std"))
    if images.get("do_normalize") is False:
        data |= {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    resample, notes = images.get("resample", 2 if kind == "vit" else 3), list[str]()
    if isinstance(resample, int) and 0 <= resample < len(PILLOW_KERNELS):
        data["interpolation"] = PILLOW_KERNELS[resample]
    else:
        notes.append(f"preprocessor_config.json has resample {literal(resample)}: recipe.toml resizes bicubically")
    data |= _crop_of_transformers(kind, images)
    heads, size = _number(config.get("num_attention_heads")), _number(config.get("image_size"))  # a list in Swin's
    fields: dict[str, Any] = {"activation": known[activation]}
    if kind == "dinov3_vit":
        fields |= {"rope": "dinov3", "rope_temperature": _measure(config.get("rope_theta", 100.0)) or 100.0}
    return Hints(
        heads,
        None if "siglip" in kind else "cls",
        size,
        _number(config.get("patch_size")),
        norm_eps=eps,
        fields=fields,
        decoder=_decoder(config, "decoder_num_attention_heads"),
        data=data,
        class_names=_class_names(config.get("id2label")),
        notes=notes,
    )


def _decoder(config: Mapping[str, Any], heads: str) -> dict[str, Any]:
    """Return `Hints.decoder`. heads: key of the number of attention heads."""
    values = {"decoder_num_heads": _number(config.get(heads)), "mask_ratio": _measure(config.get("mask_ratio"))}
    return {name: value for name, value in values.items() if value is not None}


def _bert(config: Mapping[str, Any]) -> Hints:
    _refuse_other(config, {"hidden_act": ("gelu",), "position_embedding_type": ("absolute",)})
    text = {"dropout": _measure(config.get("hidden_dropout_prob", 0.1)) or 0.0}
    return Hints(_number(config.get("num_attention_heads")), norm_eps=_measure(config.get("layer_norm_eps")), text=text)


def _t5(config: Mapping[str, Any]) -> Hints:
    _refuse_other(config, {"feed_forward_proj": ("relu", "gated-gelu")})
    # upstream: transformers 5 writes that all are tied, and apart from it whether outputs are scaled.
    tied = config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True)) is not False
    distance = _number(config.get("relative_attention_max_distance", 128))
    text = {"tied": tied, "dropout": _measure(config.get("dropout_rate", 0.1)) or 0.0}
    text |= {} if distance is None else {"max_distance": distance}
    return Hints(norm_eps=_measure(config.get("layer_norm_epsilon")), text=text)


def _refuse_other(config: Mapping[str, Any], known: Mapping[str, tuple[str, ...]]) -> None:
    """Raise DataError if a setting is given with another word than the known ones."""
    for name, words in known.items():
        if (word := config.get(name, words[0])) not in words:
            raise DataError(f"config.json has {name} {literal(word)}, but only {', '.join(words)} can be imported")


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
        size, crop = _number(size) or 256, _number(crop) or 224
        pct = min(1.0, crop / size)
        # The transform rounds crop / pct down, which must give `size` again.
        fields["crop_pct"] = pct if math.floor(crop / pct) == max(size, crop) else math.nextafter(pct, 0)
    return fields


def _timm(config: Mapping[str, Any]) -> Hints:
    said = config.get("pretrained_cfg")
    said = {**config, **(said if isinstance(said, dict) else {})}
    data = dict(HALF) | _colours(said.get("mean"), said.get("std"))
    notes = []
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
    arguments = config.get("model_args")
    arguments = arguments if isinstance(arguments, dict) else {}
    known = fields_of(str(config["architecture"])) or {}
    fields = ({"rope": "none"} if known else {}) | _fields(known) | _rope_of_timm(arguments, known)
    for argument, words in _OF_TIMM.items():
        if (word := arguments.get(argument)) is not None and word not in words:
            raise DataError(f"config.json has {argument} {literal(word)}, but only {', '.join(words)} can be imported")
    if arguments.get("pool_include_prefix"):
        raise DataError("config.json has pool_include_prefix, but vitpar's models pool over patches only")
    if (activation := arguments.get("act_layer")) is not None:
        fields["activation"] = activation
    heads = _number(arguments.get("num_heads"))
    if heads is None and known and _number(config.get("num_features")) in (None, known["embed_dim"]):
        heads = known["num_heads"]
    size = said.get("input_size")
    pool = {"token": "cls", "avg": "avg"}.get(str(config.get("global_pool") or said.get("global_pool")))
    return Hints(
        heads,
        pool,
        _number(size[-1]) if isinstance(size, list) and size else None,
        norm_eps=known.get("norm_eps"),
        fields=fields,
        data=data,
        class_names=_class_names(config.get("label_names")),
        notes=notes,
    )


def _rope_of_timm(arguments: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of rotary positions that the arguments of timm's ``Eva`` change.

    known: fields of the architecture.
    """
    if "use_rot_pos_emb" not in arguments and "rope" not in known:
        return {}
    if arguments.get("use_rot_pos_emb") is False:
        return {"rope": "none"}
    kind = {"cat": "axial", "dinov3": "dinov3"}.get(str(arguments.get("rope_type")))
    fields: dict[str, Any] = {"rope": kind} if kind else {} if "rope" in known else {"rope": "axial"}
    if (temperature := _measure(arguments.get("rope_temperature"))) is not None:
        fields["rope_temperature"] = temperature
    grid = arguments.get("ref_feat_shape")
    if isinstance(grid, list) and grid and (side := _number(grid[0])) is not None:
        fields["rope_grid"] = side
    return fields


def _colours(mean: Any, std: Any) -> dict[str, tuple[float, ...]]:
    given = {"mean": mean, "std": std}
    colours = {
        name: tuple(number for each in value if (number := _measure(each)) is not None)
        for name, value in given.items()
        if isinstance(value, list | tuple) and len(value) == 3
    }
    return {name: numbers for name, numbers in colours.items() if len(numbers) == 3}


def _class_names(said: Any) -> tuple[str, ...] | None:
    """Return the names of classes 0, 1, …, from a list or from a table by number; None if `said` is neither.

    transformers writes LABEL_0, LABEL_1, … for classes without names. Names may repeat: ImageNet has two cranes.

    Raises DataError as `check_class_names` does.
    """
    if isinstance(said, dict) and all(str(label) in said for label in range(len(said))):
        said = [said[str(label)] for label in range(len(said))]
    usable = isinstance(said, list) and said and all(isinstance(name, str) for name in said)
    usable = usable and said != [f"LABEL_{label}" for label in range(len(said))]
    if not usable:
        return None
    check_class_names([*dict.fromkeys(said)])
    return tuple(said)


def _measure(value: Any) -> float | None:
    """Return `value` as a float if it is a number that a recipe may contain, else None."""
    return float(value) if isinstance(value, int | float) and abs(value) <= MAX_MEASURE else None


def _number(value: Any) -> int | None:
    """Return `value` if it is a positive integer, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
