"""Plans for torch's `parallelize_module`: applied by it to modules outside vitpar, and read from torch's own styles."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from helpers.ranks import Ranks
from vitpar import model_config, tensor_parallel_plan
from vitpar.errors import ModelError, StrategyError
from vitpar.models.roles import ROLES, TABLE, role_of
from vitpar.parallel.tensor import FORWARDS


class Attention(nn.Module):
    """timm's attention with separate queries, keys and values."""

    def __init__(self, width: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj, self.k_proj, self.v_proj, self.proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        inputs = (layer(x) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in inputs)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """timm's block: norm, attention, norm, MLP."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(width), Attention(width, 4), nn.LayerNorm(width)
        self.mlp = nn.Sequential()
        self.mlp.fc1, self.mlp.act, self.mlp.fc2 = nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


ROWS: dict[str, Any] = {
    **{f"attn.{name}_proj": "column" for name in "qkv"},
    "attn.proj": RowwiseParallel(),
    "mlp.fc1": "colwise",
    "mlp.fc2": "row",
    "norm1": SequenceParallel(),
    "norm2": "norm",
}


def compared(device: torch.device, strategy: str) -> dict[str, float]:
    """Return the error of the output and of each gradient of a block under a plan, against one process."""
    torch.manual_seed(0)
    whole, split = Block().double(), Block().double()
    split.load_state_dict(whole.state_dict())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize_module(split, mesh, tensor_parallel_plan(ROWS, strategy))
    x = torch.randn(6, 5, 16, dtype=torch.float64)
    rank, sp = mesh.get_local_rank(), strategy.endswith("+sp")
    mine = x.chunk(2)[rank] if sp else x
    y, expected = split(mine), whole(x)
    factors = torch.linspace(1, 2, 6, dtype=torch.float64)[:, None, None]
    (y * (factors.chunk(2)[rank] if sp else factors)).sum().backward()
    (expected * factors).sum().backward()
    found = {"output": (y - (expected.chunk(2)[rank] if sp else expected)).abs().max().item()}
    for (name, p), (_, reference) in zip(split.named_parameters(), whole.named_parameters(), strict=True):
        assert p.grad is not None and reference.grad is not None
        gradient = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        if sp and (name.startswith("norm") or name in ("attn.proj.bias", "mlp.fc2.bias")):
            torch.distributed.all_reduce(gradient)  # as the docstring of tensor_parallel_plan asks
        found[name] = (gradient - reference.grad).abs().max().item()
    return found


@pytest.mark.parametrize("strategy", ["tp2", "tp2+sp"])
def test_plain_parallelize_module_applies_a_plan(strategy: str, ranks: Ranks) -> None:
    for errors in ranks(2).run(compared, strategy):
        assert len(errors) == 17 and max(errors.values()) < 1e-12, errors


def test_plan_of_a_layer_names_its_modules() -> None:
    layers = model_config("vit_tiny_patch16_224").layers
    styles = tensor_parallel_plan(layers["blocks.0"], "tp2")
    assert {name: str(style) for name, style in styles.items()} == {
        **dict.fromkeys(("attn.qkv", "mlp.fc1"), "ColumnLinear(1d)"),
        **dict.fromkeys(("attn.proj", "mlp.fc2"), "RowLinear(1d)"),
    }
    assert tensor_parallel_plan(layers["blocks.0"], "dp2") == {}
    with pytest.raises(StrategyError, match="has several strategies: name that of this layer"):
        tensor_parallel_plan(layers["blocks.0"], "pp1: 0=tp2, *=dp2")
    assert str(tensor_parallel_plan(layers["embed"], "tp4+2d")[""]) == "Parameters(2d)"
    assert len({*styles.values()}) == len(styles), "torch writes into style objects, so each key has its own"


def test_table_has_known_roles_and_styles() -> None:
    rows = [row for roles in TABLE.values() for row in roles.values()]
    assert {role for roles in TABLE.values() for role in roles} <= ROLES.keys()
    assert {row.style for row in rows} - FORWARDS.keys() == {"Replicate", "Shard"}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("column", "column"),
        ("rowwise", "row"),
        (ColwiseParallel(), "column"),
        (SequenceParallel(), "norm"),
        ("columns", r"role 'columns' \(did you mean 'column'\?\): use one of column, row,"),
        ("colwise_gather_output", "use one of column, row,"),
        (ColwiseParallel(output_layouts=Shard(1)), "ColwiseParallel with other output_layouts than by default"),
        (RowwiseParallel(use_local_output=False), "RowwiseParallel with other use_local_output than by default"),
        (PrepareModuleInput(), r"style PrepareModuleInput: use ColwiseParallel\(\), RowwiseParallel\(\), "),
    ],
)
def test_stock_styles_and_words_are_read_as_roles(given: str | ParallelStyle, found: str) -> None:
    if found in ROLES:
        assert role_of(given, "fc1") == found
    else:
        with pytest.raises(ModelError, match=found):
            role_of(given, "fc1")
