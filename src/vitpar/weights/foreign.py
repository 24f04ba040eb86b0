"""Families whose weights other libraries have too, and the recognition of tensors by their names."""

from __future__ import annotations

from vitpar.errors import DataError
from vitpar.models.bert.names import WEIGHTS as BERT
from vitpar.models.convert import Conversion
from vitpar.models.mae.names import WEIGHTS as MAE
from vitpar.models.rows import Found, Shapes
from vitpar.models.swin.names import WEIGHTS as SWIN
from vitpar.models.t5.names import WEIGHTS as T5
from vitpar.models.vit.names import WEIGHTS as VIT
from vitpar.weights.shards import listed

FAMILIES: dict[str, Conversion] = {one.family.FAMILY: one for one in (BERT, T5, SWIN, MAE, VIT)}
"""Conversions by family. The patch projection, by which ViT's formats are recognised, is in other families too."""
OWN = ("embed.patch_embed.proj.weight", "embed.word_embeddings.weight")
"""Names that identify weights of vitpar."""


def recognised(place: object, shapes: Shapes, *, classifies: bool = False) -> tuple[Conversion, Found]:
    """Return (conversion of the family, tensors whose names are known).

    place: origin of the tensors, for messages.
    classifies: whether a classifier is wanted. A masked autoencoder then counts as the Vision Transformer that is its
        encoder.

    Raises DataError for an unknown format, and for names that a model of the format does not have.
    """
    for family in FAMILIES.values():
        found = None if family is MAE and classifies else family.renamed(shapes)
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
