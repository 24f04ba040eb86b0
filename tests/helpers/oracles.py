"""Independent implementations to compare with: timm, torchvision and transformers.

A test that needs one imports it from here, and fails if it is missing: `make setup` installs all three.
"""

import importlib
import sys
from types import ModuleType

import torch


def import_torchvision() -> ModuleType:
    """Import torchvision even if its compiled operators do not match this build of torch.

    Its Python code registers fakes of two operators, which fails if they do not exist. Here they are declared without
    an implementation. Neither the transforms nor timm needs these operators.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for operator in ("nms", "qnms"):
            _DECLARED.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return importlib.import_module("torchvision")


_DECLARED = torch.library.Library("torchvision", "FRAGMENT")  # operators exist as long as this object
torchvision = import_torchvision()
timm = importlib.import_module("timm")
for part in ("loss", "optim", "scheduler"):
    importlib.import_module(f"timm.{part}")
transformers = importlib.import_module("transformers")

__all__ = ["timm", "torchvision", "transformers"]
