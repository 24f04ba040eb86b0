"""Independent implementations to compare with: timm, torchvision and transformers.

A test that needs one imports it from here, and fails if it is missing: `make setup` installs all three.
"""

import importlib

from helpers.torchvision_import import import_torchvision

torchvision = import_torchvision()
timm = importlib.import_module("timm")
for part in ("loss", "optim", "scheduler"):
    importlib.import_module(f"timm.{part}")
transformers = importlib.import_module("transformers")

__all__ = ["timm", "torchvision", "transformers"]
