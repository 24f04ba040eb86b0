"""Models by the layer contract: configurations, descriptions, layers, initial values.

Importing this package loads no torch; ``vitpar.models.layers`` and the layers of each family do.
"""

from vitpar.models.bert.config import BertConfig
from vitpar.models.config import IGNORED, ModelConfig
from vitpar.models.description import InputSpec, SideInput
from vitpar.models.families import FAMILIES, SHIPPED, config_from_json, config_to_json, model_config
from vitpar.models.swin.config import SwinConfig
from vitpar.models.t5.config import T5Config
from vitpar.models.vit.config import ViTConfig

__all__ = [
    "FAMILIES",
    "IGNORED",
    "SHIPPED",
    "BertConfig",
    "InputSpec",
    "ModelConfig",
    "SideInput",
    "SwinConfig",
    "T5Config",
    "ViTConfig",
    "config_from_json",
    "config_to_json",
    "model_config",
]
