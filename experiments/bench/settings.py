"""The training settings of all contenders, and what a contender is."""

from collections.abc import Callable
from types import SimpleNamespace

from torch import Tensor, nn

LR, WEIGHT_DECAY, BETAS, EPS = 1e-4, 0.05, (0.9, 0.999), 1e-8
CLIP = 1.0
SEED = 0

# The fields of a recipe's [optimizer] section; recipes themselves need packages that a GPU machine may lack.
OPTIMIZER = SimpleNamespace(
    name="adamw",
    lr=LR,
    weight_decay=WEIGHT_DECAY,
    betas=BETAS,
    eps=EPS,
    momentum=0.0,
    nesterov=False,
    implementation="auto",
)

Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""One training step on this rank's images and labels: forward, backward, clip, AdamW.

Returns this rank's part of the global batch's loss (the parts add up to it) and the gradients' norm, both 0-dim.
"""


def decay_groups(model: nn.Module) -> list[dict]:
    """The parameters of `model` as AdamW takes them, weight decay on matrices only, as vitpar does.

    timm's patch embedding is a convolution, hence the 4 dims.
    """
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim in (2, 4)], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim not in (2, 4)], "weight_decay": 0.0},
    ]
