"""Recognition of tensors of other libraries: their family and their format."""

from __future__ import annotations

from types import ModuleType

from vitpar.errors import DataError
from vitpar.models.bert import foreign as bert
from vitpar.models.foreign import Renamed, Shapes
from vitpar.models.mae import foreign as mae
from vitpar.models.swin import foreign as swin
from vitpar.models.t5 import foreign as t5
from vitpar.models.vit import foreign as vit
from vitpar.weights.shards import listed

FAMILIES: tuple[ModuleType, ...] = (bert, t5, swin, mae, vit)
"""Conversions of each family. The patch projection, by which ViT's formats are recognised, is in every family."""


def recognised(place: object, shapes: Shapes, *, classifies: bool = False) -> tuple[ModuleType, Renamed]:
    """Return (conversion of the family, tensors under vitpar's names).

    place: origin of the tensors, for messages.
    classifies: whether a classifier is wanted. A masked autoencoder then counts as the Vision Transformer that is its
        encoder.

    Raises DataError for an unknown format, and for names that a model of the format does not have.
    """
    for family in FAMILIES:
        renamed: Renamed | None = None if family is mae and classifies else family.renamed(shapes)
        if renamed is None:
            continue
        if renamed.unknown:
            raise DataError(
                f"'{place}' has {listed(list(renamed.unknown))}, which vitpar's model lacks: use another model"
            )
        return family, renamed
    raise DataError(
        f"the tensor names in '{place}' are not those of timm's, transformers' or vitpar's models: it has "
        f"{listed(sorted(shapes))}"
    )
