"""Small float64 parameters with a ViT's names, sharded in many ways with plain torch, without vitpar."""

import zlib

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

# Tensor parallelism divides these dims, as it must; fsdp often does not. Over 3 ranks, or 2 under tp2, one rank has
# an empty shard of fc1 in block 0.
WIDTH, HEADS, HEAD_DIM, CLASSES = 8, 4, 3, 3
STACKED = (HEAD_DIM,) * 3
"""Rows of queries, keys and values of a head."""
HIDDEN = {"blocks.0": 2, "blocks.1": 12}


def layer_shapes(layer: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's parameters, by their names in the model."""
    if layer == "head":
        shapes: dict[str, tuple[int, ...]] = {"norm.weight": (WIDTH,), "fc.weight": (CLASSES, WIDTH)}
        return {f"head.{name}": shape for name, shape in {**shapes, "fc.bias": (CLASSES,)}.items()}
    inner = HEADS * HEAD_DIM
    shapes = {"norm1.weight": (WIDTH,), "attn.qkv.weight": (3 * inner, WIDTH), "attn.qkv.bias": (3 * inner,)}
    shapes |= {"attn.proj.weight": (WIDTH, inner), "mlp.fc1.weight": (HIDDEN[layer], WIDTH)}
    shapes |= {"mlp.fc1.bias": (HIDDEN[layer],), "mlp.fc2.weight": (WIDTH, HIDDEN[layer]), "mlp.fc2.bias": (WIDTH,)}
    return {f"{layer}.{name}": shape for name, shape in shapes.items()}


LAYERS = ("blocks.0", "blocks.1", "head")
SHAPES = {name: shape for layer in LAYERS for name, shape in layer_shapes(layer).items()}
QKV = tuple(name for name in SHAPES if name.endswith("qkv.weight"))


def layers_above(name: str) -> int:
    """Return the number of layers above a parameter. The norm before the classifier belongs to the last block."""
    layer = "blocks.1" if name == "head.norm.weight" else next(layer for layer in LAYERS if name.startswith(layer))
    return len(LAYERS) - 1 - LAYERS.index(layer)


def drawn(kind: str, name: str) -> Tensor:
    """Return a complete float64 tensor for the parameter `name`, which depends only on the arguments."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{kind}/{name}".encode()))
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64)


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(value: Tensor, parameter: Tensor) -> Tensor:
    """Return the complete tensor `value` sharded as `parameter` is."""
    if isinstance(parameter, DTensor):
        return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return value


def modules(layers: tuple[str, ...]) -> nn.Module:
    """Return modules with the initial parameters of `layers`, under the model's names."""
    root = nn.Module()
    for name in (name for layer in layers for name in layer_shapes(layer)):
        *path, last = name.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(last, nn.Parameter(drawn("value", name)))
    return root


def split_dim(name: str) -> int | None:
    """Return the dim of a parameter that tensor parallelism splits, or None."""
    if name.endswith(("qkv.weight", "qkv.bias", "fc1.weight", "fc1.bias")):
        return 0
    return 1 if name.endswith(("proj.weight", "fc2.weight", "fc.weight")) else None


def replace_(root: nn.Module, name: str, value: Tensor) -> None:
    owner, _, last = name.rpartition(".")
    setattr(root.get_submodule(owner), last, nn.Parameter(value))


def wrapped(mesh: str) -> nn.Module:
    """Return this rank's modules under a strategy such as tp2xfsdp2: split over tp, then wrapped by ``fully_shard``."""
    axes = {part.rstrip("0123456789"): int(part.lstrip("dfpst")) for part in mesh.split("x")}
    assert set(axes) <= {"pp", "dp", "fsdp", "tp"}
    devices = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    layers = LAYERS
    if "pp" in axes:
        layers = (LAYERS[:1], LAYERS[1:])[devices.get_local_rank("pp")]
    root = modules(layers)
    if "tp" in axes:
        for name, p in list(root.named_parameters()):
            if (dim := split_dim(name)) is not None:
                replace_(root, name, distribute_tensor(p.detach(), devices["tp"], [Shard(dim)], src_data_rank=None))
    if "fsdp" in axes:
        for layer in layers:
            over = devices["dp", "fsdp"] if "dp" in axes else devices["fsdp"]
            fully_shard(root.get_submodule(layer), mesh=over)
    return root


def over_two_tensor_axes() -> nn.Module:
    """Return modules split over both axes of a 2 x 2 mesh: one dim twice, or two dims once each."""
    devices = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    root = modules(LAYERS)
    for name, p in list(root.named_parameters()):
        if (dim := split_dim(name)) is not None:
            second = 1 - dim if name.startswith("blocks.1.") and p.dim() == 2 else dim
            placements = [Shard(dim), Shard(second)]
            replace_(root, name, distribute_tensor(p.detach(), devices, placements, src_data_rank=None))
    return root


TWO_AXES = "two tensor axes"
"""Name of the layout of `over_two_tensor_axes`."""
MESHES = {"fsdp2": 2, "tp2": 2, "fsdp3": 3, "tp2xfsdp2": 4, "fsdp2xtp2": 4, "dp2xfsdp2": 4, "pp2xfsdp2": 4}


def ranks_of(layout: str) -> int:
    """Return the number of ranks of a layout."""
    return 4 if layout == TWO_AXES else MESHES[layout]


def built(layout: str) -> nn.Module:
    """Return this rank's modules under a layout; collective."""
    return over_two_tensor_axes() if layout == TWO_AXES else wrapped(layout)


def give_gradients(root: nn.Module, step: int) -> None:
    """Set random gradients, sharded as the parameters are; empty shards have empty ones, as after FSDP's backward."""
    for name, p in root.named_parameters():
        p.grad = like(drawn(str(step), name), p)
