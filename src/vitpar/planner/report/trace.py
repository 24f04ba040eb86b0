"""A step's timeline in the Trace Event Format, which chrome://tracing and Perfetto show."""

from __future__ import annotations

from typing import Any

from vitpar.planner.cost.price import Price

NAMES = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}


def trace(price: Price) -> dict[str, Any]:
    """The events of one step; times in microseconds. A process is a place of the pp axis.

    Source: "Trace Event Format", Google, complete events (ph X).
    """
    places = sorted({event.pp for event in price.events})
    named = [{"name": "process_name", "ph": "M", "pid": pp, "tid": 0, "args": {"name": f"pp {pp}"}} for pp in places]
    events = [
        {
            "name": f"{NAMES[event.kind]} {event.microbatch}",
            "cat": event.kind,
            "ph": "X",
            "pid": event.pp,
            "tid": 0,
            "ts": event.start * 1e6,
            "dur": (event.end - event.start) * 1e6,
            "args": {"stage": event.stage, "microbatch": event.microbatch},
        }
        for event in price.events
    ]
    return {"traceEvents": [*named, *events], "displayTimeUnit": "ms", "otherData": {"plan": str(price.plan)}}
