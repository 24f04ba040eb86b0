"""One pipeline stage: consecutive layers of the model, with redistributions where their layouts differ."""

from collections.abc import Collection

from torch import Tensor

from vitpar.models.config import ViTConfig
from vitpar.models.vit import ViT
from vitpar.parallel.redistribute import Redistribute
from vitpar.strategy import Part


class Stage(ViT):
    """The layers `names` of a model, each computing this rank's part of a micro-batch.

    before: what to do with the activation before a layer, by its name. after: and behind the last layer.
    rows: this rank's part of the batch in every layer, by name.
    """

    def __init__(self, config: ViTConfig, names: Collection[str]) -> None:
        super().__init__(config, names)
        self.before: dict[str, Redistribute] = {}
        self.after: Redistribute | None = None
        self.rows: dict[str, Part] = {}

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """x: this rank's part of the images or tokens. keys: int64, those of the whole micro-batch, or None."""
        for name, layer in self.layers().items():
            if name in self.before:
                x = self.before[name](x)
            here = None
            if keys is not None:
                rows = self.rows[name].row_range(len(keys))
                here = keys[rows.start : rows.stop]
            x = layer(x) if name == "head" else layer(x, here)
        return x if self.after is None else self.after(x)
