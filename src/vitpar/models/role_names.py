"""Names that users may give to roles of tensor parallelism: vitpar's, torch's stock styles, transformers' words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitpar.errors import ModelError
from vitpar.models.roles import ROLES
from vitpar.text import nearest, shown

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

WORDS = {"colwise": "column", "rowwise": "row", "sequence_parallel": "norm"}
"""Roles by transformers' words in a `tp_plan`."""
STOCK = {"ColwiseParallel": "column", "RowwiseParallel": "row", "SequenceParallel": "norm"}
"""Roles by the names of torch's styles (``torch.distributed.tensor.parallel``)."""


def role_of(given: str | ParallelStyle, where: str) -> str:
    """Return the role that a name or stock style stands for.

    A style is read as a name and never applied, so that plans with it are priced and checked as any other.

    where: module that it is given for, for messages.

    Raises ModelError for a style with other options than its defaults, and for anything without a role.
    """
    if isinstance(given, str):
        if (role := WORDS.get(given, given)) in ROLES:
            return role
        raise ModelError(
            f"{where} has the role '{shown(given)}'{nearest(given, [*ROLES, *WORDS])}: use one of "
            f"{', '.join([*ROLES, *WORDS])}"
        )
    name = type(given).__name__
    if name not in STOCK or type(given).__module__.partition(".")[0] != "torch":
        raise ModelError(
            f"{where} has the style {shown(name)}: use {', '.join(f'{stock}()' for stock in STOCK)} or a role"
        )
    usual = vars(type(given)())
    if changed := [key for key, value in vars(given).items() if value != usual.get(key)]:
        raise ModelError(
            f"{where} has {name} with other {', '.join(changed)} than by default: leave them out, since vitpar chooses "
            "layouts by the plan"
        )
    return STOCK[name]
