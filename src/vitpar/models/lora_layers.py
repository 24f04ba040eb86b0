"""Low-rank adapters of linear layers (``vitpar.models.lora``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor, nn

from vitpar.errors import ModelError
from vitpar.models.config import Rules
from vitpar.models.initial import constant, fan_in_uniform, normal
from vitpar.models.lora import A, B, LoRA
from vitpar.text import shown

RULES: dict[str, Rules] = {
    # kaiming_uniform with a = √5, as in peft and nn.Linear.
    "lora": ((f"*{A}.weight", fan_in_uniform), (f"*{B}.weight", constant(0.0))),
    "perturbed": ((f"*{A}.weight", fan_in_uniform), (f"*{B}.weight", normal(0.1))),
}
"""Rules of initial values by ``LoRA.init``."""


class AdaptedLinear(nn.Linear):
    """Linear layer with an adapter: mixed into the class of the layer that is adapted.

    Tensor parallelism and float8 replace `product`, the layer without its adapter, and not `forward`.
    """

    lora_A: nn.Linear
    lora_B: nn.Linear
    lora_scale: float

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in] -> [..., out]."""
        # The factor on the few features between A and B.
        return self.product(x) + self.lora_B(self.lora_A(x) * self.lora_scale)

    def product(self, x: Tensor) -> Tensor:
        """Return what the layer gives without its adapter."""
        return super().forward(x)


@cache
def _adapted(kind: type[nn.Linear]) -> type[AdaptedLinear]:
    return type(f"AdaptedLinear{kind.__name__}", (AdaptedLinear, kind), {})


def adapt(layer: nn.Module, names: Sequence[str], rank: int, scale: float) -> None:
    """Give the linear layers of `layer` called `names` adapters, which are not filled.

    Raises ModelError for a module of another class.
    """
    for name in names:
        module = layer.get_submodule(name)
        if not isinstance(module, nn.Linear):
            raise ModelError(
                f"{shown(name)} is a {type(module).__name__}: only nn.Linear can be adapted, so leave it out of "
                "lora.targets"
            )
        module.__class__ = _adapted(type(module))  # type: ignore[arg-type]
        like = partial(nn.Linear, bias=False, device=module.weight.device, dtype=module.weight.dtype)
        module.lora_A, module.lora_B = like(module.in_features, rank), like(rank, module.out_features)
        module.lora_scale = scale  # type: ignore[assignment]


def product_name(module: nn.Module) -> str:
    """Return the name of the method that computes a module without an adapter, which a plan may replace."""
    return "product" if isinstance(module, AdaptedLinear) else "forward"


def merged_parameter(config: LoRA, name: str, value: Tensor, read: Callable[[str], Tensor]) -> Tensor:
    """Return a parameter of the model without adapters that gives what `config` does.

    name, value: parameter of the model with adapters.
    read: returns the unsharded parameters of adapters by their names.
    """
    module = name.removesuffix(".weight")
    if module == name or module not in config.modules:
        return value
    wide = torch.promote_types(value.dtype, torch.float32)
    a, b = (read(f"{module}{end}.weight").to(wide) for end in (A, B))
    return torch.addmm(value.to(wide), b, a, alpha=config.scale).to(value.dtype)
