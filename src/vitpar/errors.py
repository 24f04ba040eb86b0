"""Errors that the user must fix. Each is one sentence: the offending value and the fix.

The command line prints these without a traceback and exits with code 2. A broken invariant is an ``assert`` instead.
"""

from vitpar.text import printable


class UserError(ValueError):
    """Base of errors that the user must fix."""

    def __str__(self) -> str:
        # Messages quote names from untrusted files, which must not control a terminal.
        return printable(super().__str__())


class StrategyError(UserError):
    """A strategy string or plan that is malformed, or that does not fit the model, the batch or the devices."""


class RecipeError(UserError):
    """A recipe with an unknown key, a wrong value or a setting that contradicts another."""


class ModelError(UserError):
    """An unknown model name or a model option that does not fit the others."""


class DataError(UserError):
    """A missing, empty or damaged data set, or a sample that cannot be used."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, of another model or training, or that cannot be written."""


class LaunchError(UserError):
    """A world of processes that cannot be formed from the given environment."""


class DeviceMemoryError(UserError):
    """A model, batch and plan that need more memory than a device has."""


class PlannerError(UserError):
    """A profile or cluster that cannot be used, or a search without a result."""


class FaultError(RuntimeError):
    """A fault that the user did not cause, such as ranks that hang or disagree, as one sentence; exit code 1."""
