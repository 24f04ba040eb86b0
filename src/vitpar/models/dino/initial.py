"""Initial values: of the heads of DINOv2, with prototypes of length 1, and of the backbone by its own schemes."""

from vitpar.models.config import Rules
from vitpar.models.initial import constant, normal
from vitpar.models.vit.initial import SCHEMES as BACKBONE

_HEADS: Rules = (
    ("head.*.lengths.weight", constant(1.0)),
    ("head.*.mlp*.bias", constant(0.0)),
    ("head.*.weight", normal(0.02)),
    ("embed.mask_token", constant(0.0)),
)
_NORM: Rules = (("head.norm.weight", constant(1.0)), ("head.norm.bias", constant(0.0)))
_PERTURBED: Rules = (("head.*.lengths.weight", normal(0.1, mean=1.0)),)
SCHEMES: dict[str, Rules] = {
    scheme: (*_NORM, *_HEADS, *rules) if scheme != "perturbed" else (*_PERTURBED, *rules)
    for scheme, rules in BACKBONE.items()
}
"""The rules of each scheme; the first pattern that matches a parameter's name decides."""
