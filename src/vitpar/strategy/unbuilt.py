"""What the strategy language names but vitpar does not run yet. Building one of these begins with removing its row."""

from __future__ import annotations

from vitpar.errors import StrategyError

UNBUILT = {
    "layerwise plans": "give all layers one strategy, as in pp2xfsdp4",
    "+sp": "leave it out, plain tp computes the same",
    "+2d": "leave it out, plain tp splits heads and hidden features in one dimension",
    "+2.5d": "leave it out, plain tp splits heads and hidden features in one dimension",
    "+3d": "leave it out, plain tp splits heads and hidden features in one dimension",
    "+zero1": "use fsdp instead of dp, which shards the optimizer state too",
    "+zero2": "use fsdp instead of dp, which shards the optimizer state and gradients too",
    "+offload": "use fsdp and +ckpt to save memory",
    "+ckpt.selective": "use +ckpt, which recomputes whole blocks",
}
"""Feature as shown to the user -> what to use until it is built."""


def refuse_unbuilt(feature: str, place: str = "") -> None:
    """Raise StrategyError if `feature` is one of UNBUILT. `place`: a blank and where it stands."""
    if feature in UNBUILT:
        raise StrategyError(f"vitpar does not run {feature} yet{place}: {UNBUILT[feature]}")
