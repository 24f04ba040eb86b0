"""How long the ranks of a group take to send each other something, and what memory meanwhile, as the hardware profile
has it."""

from __future__ import annotations

import math

from vitpar.errors import PlannerError
from vitpar.planner.cost.groups import Group
from vitpar.planner.profile.hardware import STEPS, Hardware, Link


class Links:
    """Seconds of an operation in a group. A group that was not measured takes what the most alike one took, as a ring
    of its size would."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._found: dict[tuple[str, Group], tuple[Link, float, float]] = {}

    def seconds(self, operation: str, group: Group, size: float) -> float:
        """Of `size` bytes, counted as `Link` says."""
        if group.alone or not size:
            return 0.0
        link, more_messages, more_bytes = self._link(operation, group)
        if more_messages == more_bytes == 1:
            return link.seconds(size)
        latency = min(link.latency, link.seconds(size))
        return latency * more_messages + (link.seconds(size) - latency) * more_bytes

    def scratch(self, operation: str, group: Group, size: float) -> float:
        """Bytes that it takes meanwhile, besides what is sent and received."""
        return 0.0 if group.alone or not size else self._link(operation, group)[0].scratch(size)

    def _link(self, operation: str, group: Group) -> tuple[Link, float, float]:
        key = operation, group
        if key not in self._found:
            self._found[key] = self._closest(operation, group)
        return self._found[key]

    def _closest(self, operation: str, group: Group) -> tuple[Link, float, float]:
        candidates = [link for link in self._hardware.links if link.operation == operation]
        if not candidates:
            raise PlannerError(
                f"the hardware profile '{self._hardware.name}' has no {operation}, which plans of more than one rank "
                "need: measure with more ranks by vitpar profile hardware --ranks"
            )

        def distance(link: Link) -> tuple[float, ...]:
            nodes = abs(math.log(link.nodes / group.nodes))
            return (
                (link.nodes > 1) != (group.nodes > 1),
                abs(math.log(link.ranks / group.ranks)) + nodes,
                abs(math.log(link.stride / group.stride)),
            )

        link = min(candidates, key=distance)
        measured, wanted = STEPS[operation](link.ranks), STEPS[operation](group.ranks)
        return link, wanted[0] / measured[0], wanted[1] / measured[1]
