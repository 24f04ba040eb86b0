"""Record what the compiler's generated code would launch, by running it on tensors without memory.

The generated code of a graph is a Python function that allocates buffers and starts kernels. Here it runs on the device
meta: Triton kernels only note that they were started, operations of ATen only compute the shape of their output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.graph import GraphLowering
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from bench.dry.work import Graph, Launch

META = torch.device("meta")
PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "_scaled_mm")
ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "lift_fresh")


class GeneratedKernel:
    """A Triton kernel of generated code, which does not run.

    autotuner: the compiler's object with the kernel's configurations.
    """

    def __init__(self, name: str, source: str) -> None:
        self.name = name
        self.autotuner: Any = getattr(PyCodeCache.load(source), name)
        self.bytes = round(1e9 * self.autotuner.inductor_meta["kernel_num_gb"])
        self.launched: Callable[[Launch], None] | None = None

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Note a start of the kernel."""
        assert self.launched is not None, f"{self.name} runs outside of the recording"
        self.launched(Launch("triton", self.name, self.bytes))


class _Stopped(Exception):
    """Error: the generated code was called by the compiled function, after its recording."""


class Recording:
    """Graphs and Triton kernels that the compiler generates inside ``with recording.of(...)``."""

    def __init__(self) -> None:
        self.graphs: list[Graph] = []
        self.kernels: dict[str, GeneratedKernel] = {}

    def of(self, compiled: Callable[..., Any], *args: Any, kept: tuple[int, ...]) -> None:
        """Compile the forward and the backward of `compiled` for these arguments, and record their code.

        kept: shape of the block's input, which counts as an activation where backward needs it.
        """
        self._kept = kept
        with self._patched():
            try:
                compiled(*args)
            except _Stopped:
                return
        raise AssertionError("nothing was compiled")

    @contextmanager
    def _patched(self) -> Iterator[None]:
        lines, triton = GraphLowering._compile_to_module_lines, AsyncCompile.triton

        def load(graph: GraphLowering, code: Any) -> ModuleType:
            module = lines(graph, code)
            self.graphs.append(self._record(module, graph))
            vars(module)["call"] = _stop
            return module

        def keep(compiler: AsyncCompile, name: str, source: str, device_str: str = "cuda") -> GeneratedKernel:
            return self.kernels.setdefault(name, GeneratedKernel(name, source))

        GraphLowering._compile_to_module_lines, AsyncCompile.triton = load, keep  # type: ignore[method-assign]
        try:
            yield
        finally:
            GraphLowering._compile_to_module_lines, AsyncCompile.triton = lines, triton  # type: ignore[method-assign]

    def _record(self, module: ModuleType, graph: GraphLowering) -> Graph:
        inputs = [_meta(graph.graph_inputs[name]) for name in graph.graph_input_names]
        # CUDA builds of torch ask the driver for the stream.
        vars(module).update(empty_strided_cuda=_allocate, get_raw_stream=lambda device: 0)
        mode = _Launches()
        for value in vars(module).values():
            if isinstance(value, GeneratedKernel):
                value.launched = mode.launches.append
        with mode:
            outputs = module.call(list(inputs))
        saved = 0 if graph.is_backward else self._saved(inputs, outputs)
        return Graph(graph.is_backward, tuple(mode.launches), saved)

    def _saved(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        """Return the bytes of activations among the outputs of a forward: not its first one, and no parameters."""
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        known = {_storage(x) for x in tensors if x.shape != self._kept} | {_storage(outputs[0])}
        kept = {_storage(x): x.untyped_storage().nbytes() for x in outputs[1:] if isinstance(x, Tensor)}
        return sum(size for storage, size in kept.items() if storage not in known)


class _Launches(TorchDispatchMode):
    """Mode that notes the kernels of the operations inside."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, given = tree_map_only(torch.device, lambda device: META, (args, dict(kwargs or {})))
        name = func._schema.name.partition("::")[2]
        if func.namespace == "vitpar" and "attention" not in name:  # its body runs operations of ATen in turn
            with self:
                return OPDEFS[func.name().split(".")[0]]._init_fn(*args, **given)
        written = given.get("out")
        result = func(*args, **given) if written is None else written
        views = any(made.alias_info is not None and not made.alias_info.is_write for made in func._schema.returns)
        if not views and name not in ALLOCATIONS:
            self.launches.append(_launch(func, name, args, given, result))
        return result


def _launch(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Launch:
    """Return the kernel of an operation."""
    taken = [x for x in tree_leaves((args, {key: x for key, x in kwargs.items() if key != "out"})) if _is_tensor(x)]
    given = [x for x in tree_leaves(result) if _is_tensor(x)]
    size = sum(map(_nbytes, [*taken, *given]))
    if name in PRODUCTS:
        a, b = [x for x in args if _is_tensor(x)][name in ("addmm", "addmm_", "baddbmm") :][:2]
        rows, summed, columns = a.shape[-2], a.shape[-1], b.shape[-1]
        flops = 2 * prod(a.shape) * columns
        dtype = str(a.dtype).removeprefix("torch.")
        return Launch("product", name, size, flops, (rows, columns, summed), dtype, max(map(_nbytes, [a, b, *given])))
    if name.startswith("packed_attention"):
        batch, heads, tokens = next(x for x in [*taken, *given] if x.dtype == torch.float32).shape
        features = taken[0].shape[2] // (heads if "backward" in name else 3 * heads)
        flops = (10 if "backward" in name else 4) * batch * heads * tokens**2 * features
        return Launch("attention", name, size, flops, (batch, heads, tokens, features))
    if "attention" in name:
        counted = {key: x for key, x in kwargs.items() if key != "out"}
        flops = flop_registry[func._overloadpacket](*args, **counted, out_val=result)
        # Queries come first in forward, and after the gradient of the output in backward: both have one shape.
        return Launch("attention", name, size, flops, tuple(taken[0].shape))
    return Launch("small", name, size)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _nbytes(x: Tensor) -> int:
    """Return the bytes of a tensor's elements; those of an expanded dimension count once."""
    return prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride) * x.itemsize


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _meta(value: Any) -> Any:
    """Return a graph's input on the device meta."""
    if not hasattr(value, "get_dtype"):
        return int(value)
    size, stride = ([int(number) for number in numbers] for numbers in (value.get_size(), value.get_stride()))
    return torch.empty_strided(size, stride, dtype=value.get_dtype(), device=META)


def _allocate(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=META)


def _stop(*args: Any) -> None:
    raise _Stopped
