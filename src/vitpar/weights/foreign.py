"""Families whose weights other libraries have too, and the recognition of tensors by their names.

In checkpoints of training code a model's tensors stand behind a prefix, next to a decoder, or among counters. DINO and
DINOv2 write `teacher` and `student` with names after `backbone.`, Lightning a `state_dict` with names after `model.`,
MAE its decoder, torch's AveragedModel a counter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from vitpar.errors import DataError
from vitpar.models.bert.names import BertWeights
from vitpar.models.convert import Conversion
from vitpar.models.mae.names import MAEWeights
from vitpar.models.rows import Found, Shapes
from vitpar.models.swin.names import SwinWeights
from vitpar.models.t5.names import T5Weights
from vitpar.models.vit.names import ViTWeights
from vitpar.text import either, shown
from vitpar.weights.shards import listed
from vitpar.weights.sources import ForeignWeights

FAMILIES: dict[str, Conversion] = {
    one.family.FAMILY: one() for one in (BertWeights, T5Weights, SwinWeights, MAEWeights, ViTWeights)
}
"""Conversions by family. The patch projection, by which ViT's formats are recognised, is in other families too."""
OWN = ("embed.patch_embed.proj.weight", "embed.word_embeddings.weight")
"""Names that identify weights of vitpar."""
_COUNTERS = re.compile(r"(?:.*\.)?(?:n_averaged|total_ops|total_params|num_batches_tracked)")
"""Names of tensors that training code adds: the counters of AveragedModel, of profilers and of batch norms."""
_BETTER = ("teacher", "ema")
"""Words in the prefixes of entries that evaluate best."""


def recognised(place: object, shapes: Shapes, *, classifies: bool = False) -> tuple[Conversion, Found]:
    """Return (conversion of the family, tensors whose names are known).

    place: origin of the tensors, for messages.
    classifies: whether a classifier is wanted. A masked autoencoder then counts as the Vision Transformer that is its
        encoder.

    Raises DataError for an unknown format, and for names that a model of the format does not have.
    """
    for family in FAMILIES.values():
        found = None if isinstance(family, MAEWeights) and classifies else family.renamed(shapes)
        if found is None:
            continue
        if found.unknown:
            raise DataError(
                f"'{place}' has {listed(list(found.unknown))}, which vitpar's model lacks: use another model"
            )
        return family, found
    raise DataError(
        f"the tensor names in '{place}' are not those of timm's, transformers' or vitpar's models: it has "
        f"{listed(sorted(shapes))}"
    )


def is_model(shapes: Shapes) -> bool:
    """Return whether the names are those of a model."""
    return any(name in shapes for name in OWN) or any(family.renamed(shapes) for family in FAMILIES.values())


def unwrapped(source: ForeignWeights, prefix: str | None = None) -> ForeignWeights:
    """Return the tensors of the model in `source` under the names of its library, with notes on what is left out.

    prefix: beginning of the names of the model's tensors, which is removed; None to find it.

    Raises DataError for a prefix that no name has, and for several models among the tensors.
    """
    shapes = {name: shape for name, shape in source.shapes.items() if not _COUNTERS.fullmatch(name)}
    if prefix is None:
        prefixes = [] if is_model(shapes) else list(dict.fromkeys(_prefixes(shapes)))
        best = [one for one in prefixes if any(word in one for word in _BETTER)]
        prefixes = best or prefixes
        if len(prefixes) > 1:
            raise DataError(
                f"'{source.place}' has several models, with names after "
                f"{either(repr(shown(one)) for one in prefixes)}: choose one with --prefix"
            )
        prefix = prefixes[0] if prefixes else ""
    inside = {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}
    if not inside:
        raise DataError(
            f"no tensor of '{source.place}' has a name that begins with '{shown(prefix)}': correct --prefix"
        )
    notes = [f"names are read after '{shown(prefix)}'"] * bool(prefix)
    if outside := [name for name in shapes if not name.startswith(prefix)]:
        notes.append(f"{listed(outside)} left out, since their names do not begin with '{shown(prefix)}'")
    start = prefix
    return replace(source, shapes=inside, read=lambda name: source.read(start + name), notes=(*source.notes, *notes))


def _prefixes(shapes: dict[str, tuple[int, ...]]) -> Iterator[str]:
    """Yield the shortest prefix of every name of a patch projection behind which there is a model."""
    for name in shapes:
        parts = name.split(".")
        # A model's patch projection has at least two dots in its name: patch_embed.proj.weight.
        for length in range(1, len(parts) - 2) if "patch_embed" in name and name.endswith(".weight") else ():
            prefix = ".".join(parts[:length]) + "."
            if is_model({key.removeprefix(prefix): shapes[key] for key in shapes if key.startswith(prefix)}):
                yield prefix
                break
