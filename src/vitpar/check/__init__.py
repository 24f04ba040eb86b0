"""Check that a plan does not change the training: compare it with one process, on the same seed and samples."""

from vitpar.check.compare import CheckResult, Comparison
from vitpar.check.plan import check_plan, recipe_to_check

__all__ = ["CheckResult", "Comparison", "check_plan", "recipe_to_check"]
