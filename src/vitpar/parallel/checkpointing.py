"""Activation checkpointing: layers recompute their forward in backward instead of keeping its activations.

| policy    | kept of a layer's forward                            | recomputed       |
|-----------|------------------------------------------------------|------------------|
| full      | its input                                            | everything       |
| selective | its input, matrix products, attention, communication | everything else  |

Random numbers are functions of the sample's key (``vitpar.models.keyed_random``), so no generator state is saved.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from vitpar.models.packed_attention import PACKED_ATTENTION

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional
SAVED = {
    *(_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten._scaled_mm.default),
    *(getattr(_aten, f"_scaled_dot_product_{kind}_attention").default for kind in ("flash", "efficient", "cudnn")),
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    PACKED_ATTENTION,
    # Collectives must be saved, or recomputation would communicate again (upstream: pytorch#166926 and torchtitan's
    # list of saved operations).
    _c10d.all_reduce.default,
    _c10d.all_gather_into_tensor.default,
    _c10d.reduce_scatter_tensor.default,
    _c10d.wait_tensor.default,
}
"""Operations whose outputs the selective policy keeps."""


def recompute_in_backward(layer: nn.Module, policy: str) -> None:
    """Wrap the current forward of `layer` in activation checkpointing.

    policy: "full" or "selective".
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if policy == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    layer.forward = partial(checkpoint, layer.forward, **options)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in SAVED else CheckpointPolicy.PREFER_RECOMPUTE
