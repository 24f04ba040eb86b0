"""Models by the layer contract: configurations, layers, initial values.

Importing this package loads no torch; ``vitpar.models.vit`` does.
"""

from vitpar.models.config import FAMILIES, IGNORED, SHIPPED, ViTConfig, model_config

__all__ = ["FAMILIES", "IGNORED", "SHIPPED", "ViTConfig", "model_config"]
