"""Export of a Vision Transformer's parameters under the names of timm and transformers, with their configurations.

It undoes ``vitpar.models.vit.foreign``: what was exported can be imported again.
"""

from __future__ import annotations

from vitpar.models.foreign import Exported
from vitpar.models.vit.config import ViTConfig
from vitpar.models.vit.to_timm import to_timm
from vitpar.models.vit.to_transformers import to_transformers


def exported(config: ViTConfig, format_name: str) -> Exported:
    """Return the model as `format_name` ("timm" or "transformers") has it.

    Raises DataError for parts that no model of that library has.
    """
    return to_timm(config) if format_name == "timm" else to_transformers(config)
