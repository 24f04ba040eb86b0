"""Import of torchvision where its build does not match that of torch."""

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
