"""Initial values of masked autoencoders, by scheme."""

from vitpar.models.config import Rules
from vitpar.models.initial import constant, lecun_normal, normal, xavier_uniform

SCHEMES: dict[str, Rules] = {
    "mae": (
        ("*norm*.weight", constant(1.0)),
        ("*.bias", constant(0.0)),
        ("*_token", normal(0.02)),
        ("*", xavier_uniform()),
    ),
    "perturbed": (
        ("*norm*.weight", normal(0.1, mean=1.0)),
        ("*_token", normal(0.05)),
        ("*bias", normal(0.05)),
        ("*", lecun_normal),
    ),
}
"""The rules of each scheme; the first pattern that matches a parameter's name decides."""
