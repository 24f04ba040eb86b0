"""Training settings that all contenders share, and the type of a contender's step."""

from collections.abc import Callable
from types import SimpleNamespace

from torch import Tensor, nn

LR, WEIGHT_DECAY, BETAS, EPS = 1e-4, 0.05, (0.9, 0.999), 1e-8
CLIP = 1.0
SEED = 0

# The fields of a recipe's [optimizer] section. Not a recipe: that needs packages that a GPU machine may lack.
OPTIMIZER = SimpleNamespace(
    layer_decay=1.0,
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

Returns this rank's share of the global batch's loss (the sum over ranks is the loss) and the gradient norm, both 0-dim.
"""


def decay_groups(model: nn.Module) -> list[dict]:
    """Return parameter groups for AdamW: weight decay applies to matrices only, as in vitpar.

    Tensors of 4 dimensions count as matrices, because timm's patch embedding is a convolution. Its tables of relative
    positions have 2, and no decay.
    """
    parameters = [(p, p.ndim in (2, 4) and "bias_table" not in name) for name, p in model.named_parameters()]
    return [
        {"params": [p for p, matrix in parameters if matrix], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p, matrix in parameters if not matrix], "weight_decay": 0.0},
    ]
