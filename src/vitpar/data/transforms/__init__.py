"""From decoded pixels to an image of the model's size.

Images stay uint8, a quarter of the bytes to move; they are normalised, and mixed with each other, on the device.
"""

from vitpar.data.transforms.evaluate import EvalTransform
from vitpar.data.transforms.mix import Mix, Mixed
from vitpar.data.transforms.normalize import Normalize
from vitpar.data.transforms.policies import parse_policy
from vitpar.data.transforms.train import TrainTransform

__all__ = ["EvalTransform", "Mix", "Mixed", "Normalize", "TrainTransform", "parse_policy"]
