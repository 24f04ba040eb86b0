"""What a check found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from vitpar.check.compare import Comparison


@dataclass(frozen=True)
class CheckResult:
    """The comparison of a plan with one process.

    precision, batch_size: of the steps. comparisons: losses and norms of gradients; then for every parameter its
    gradient in the first step, its change by the SGD steps, and the changes of it and of its average by the recipe's
    steps. unchecked: what of a training was not compared.
    """

    plan: str
    model: str
    precision: str
    batch_size: int
    comparisons: tuple[Comparison, ...]
    unchecked: str

    @property
    def worst(self) -> Comparison:
        """The comparison whose error is largest in units of what is allowed."""
        return max(self.comparisons, key=lambda comparison: comparison.severity)

    @property
    def passed(self) -> bool:
        """Whether every error is within what is allowed (a NaN is not)."""
        return self.worst.severity <= 1

    @property
    def quantities(self) -> dict[str, list[Comparison]]:
        """The comparisons of tensors by quantity (`gradient`, `SGD update`, `update`, `average`), the worst first, and
        those of numbers under `number`."""
        found: dict[str, list[Comparison]] = {}
        for comparison in self.comparisons:
            quantity, _, parameter = comparison.name.rpartition(" ")
            found.setdefault(quantity if "." in parameter else "number", []).append(comparison)
        return {name: sorted(group, key=lambda c: -c.severity) for name, group in found.items()}

    def to_json(self) -> dict[str, Any]:
        """Everything, for ``vitpar check --json``."""
        return {**asdict(self), "worst": asdict(self.worst), "passed": self.passed}
