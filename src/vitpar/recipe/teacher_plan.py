"""The plan of a teacher as [distill] says it, without torch."""

from __future__ import annotations

from vitpar.errors import StrategyError
from vitpar.recipe.sections.training import DistillSection
from vitpar.strategy import Plan, parse
from vitpar.text import shown


def teacher_plan(distill: DistillSection, ranks: int) -> Plan:
    """Return the teacher's plan on `ranks` ranks.

    Raises StrategyError for other roles than a teacher's, and a plan of another number of ranks.
    """
    plan = parse(distill.plan)
    for strategy in plan.distinct:
        other = [
            *(["pp"] if plan.pp != 1 else []),
            *([f"+{strategy.tensor_mode}"] if strategy.tensor_mode != "1d" else []),
            *([f"+zero{strategy.zero}"] if strategy.zero else []),
            *(["+ckpt"] if strategy.checkpoint else []),
            *(["+offload"] if strategy.offload else []),
        ]
        if other:
            raise StrategyError(
                f"distill.plan '{shown(distill.plan)}' has {other[0]}, which a teacher does not support: use dp, fsdp "
                "and tp, also with +sp"
            )
    try:
        return plan.resolve(ranks)
    except StrategyError as error:
        raise StrategyError(f"distill.plan: {error}") from None
