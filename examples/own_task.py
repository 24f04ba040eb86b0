"""A task of your own: predict the number that names an image's label, such as an age, a weight or a count.

vitpar data pack digits data_shards/digits                # its labels are named 0 to 9
vitpar train --recipe digits --task examples/own_task.py:Value --mesh pp2xtp2 --run-dir runs/value
vitpar check --task examples/own_task.py:Value --mesh pp2xtp2
vitpar eval --task examples/own_task.py:Value --checkpoint runs/value
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

import vitpar


@dataclass(frozen=True)
class Value(vitpar.Task):
    """Regression by squared error. Labels of packed data have names; here these are the numbers to predict."""

    METRICS: ClassVar = (
        vitpar.Metric("mae", "mean absolute error", higher=False),  # the first one decides which checkpoint is best
        vitpar.Metric("within", "within tolerance", share=True),
    )

    tolerance: float = 0.5  # --set task.options.tolerance=1.0

    @property
    def outputs(self) -> int:
        """The model has one output, whatever the number of labels."""
        return 1

    @cached_property
    def values(self) -> Tensor:
        names = self.labels.names or tuple(map(str, range(self.labels.count)))
        return torch.tensor([float(name) for name in names])

    def targets(self, labels: Tensor) -> Tensor:
        return self.values.to(labels.device)[labels]

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[:, 0] - targets).square()

    def figures(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        errors = (outputs[:, 0] - targets).abs()
        return {"mae": errors, "within": (errors <= self.tolerance).double()}

    def reference(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The same loss by another formula, with which `vitpar check` compares: (o - t)² = o² - 2·o·t + t²."""
        output = outputs.squeeze(1)
        return output * output - 2 * output * targets + targets * targets

    def predict(self, outputs: Tensor) -> Mapping[str, Tensor]:
        """The columns of `vitpar predict` and of `vitpar eval --predictions`."""
        return {"value": outputs[:, 0]}
