"""Elements that operations other than matrix products and attention read and write, for one row, by arithmetic.

`usual_elements` is a formula for compiled layers of any code base; constants of the estimate and rates of clusters are
fitted to published runs with it. vitpar's compiled blocks differ from it by the extra passes of their family
(``ModelConfig.extra_passes``), which were counted with `experiments/dry_bench.py`. A pass is a read or write of
tokens x width.
"""

from __future__ import annotations

import math

from vitpar.models.config import ModelConfig
from vitpar.models.description import LayerDescription
from vitpar.planner.profile.activations import (
    given_elements,
    logits_elements,
    normed_elements,
    of_role,
    taken_elements,
)
from vitpar.strategy import Strategy
from vitpar.strategy.execution import multiplies_in_float8

Directions = tuple[float, float]
"""Numbers for (forward, backward)."""


def usual_elements(layer: LayerDescription, strategy: Strategy) -> Directions:
    """Return the elements that a compiled layer reads and writes in (forward, backward). A plain block has 54 passes.

    The elements are those of one rank of a tensor-parallel group.
    """
    t, parts = strategy.degree("tp"), _parts(strategy)
    if layer.first:
        normed = sum(map(normed_elements, of_role(layer, "norm")))
        forward = (4 * layer.gives.elements + 3 * normed) / parts
    elif layer.last:
        # The loss reads logits for their largest one and for differences to it, of which it computes exponentials and
        # their sum in float32. Backward computes them again, and gradients. In 16 bits that is 20 passes in all.
        forward = 3 * (layer.takes or layer.gives).elements / parts + 20 / 3 * logits_elements(layer, strategy)
    else:
        rows, merges = of_role(layer, "row"), of_role(layer, "merge")
        forward = sum(4 * given_elements(part) / parts + 2 * taken_elements(part) / t for part in rows)
        forward += sum(3 * taken_elements(part) / parts for part in merges)
        # The output of an adapter is added to that of its layer.
        forward += sum(3 * given_elements(part) / t for part in of_role(layer, "column_b"))
        forward += sum(3 * given_elements(part) / parts for part in of_role(layer, "row_b"))
        if layer.attention and layer.attention.windows > 1:
            forward += 4 * layer.gives.elements / parts  # tokens are moved into windows and back
    return forward, 2 * forward


def vitpar_elements(
    config: ModelConfig, layer: LayerDescription, strategy: Strategy, fp8_min_features: float = math.inf
) -> Directions:
    """Return the elements that a compiled layer of vitpar reads and writes in (forward, backward).

    fp8_min_features: smallest linear layers that multiply in float8, as in ``Execution``; infinity for none. The
    scaling of their inputs is left out.

    Differs from `usual_elements` in blocks of families that have counted their extra passes, and by the bias of fc1
    there. Models of the user keep the usual bytes.
    """
    forward, backward = usual_elements(layer, strategy)
    if not layer.is_block:
        return forward, backward
    t = strategy.degree("tp")
    # Tensor parallelism and float8 give linear layers a forward of their own (``vitpar.models.compiled.is_plain``).
    plain = {
        part.name
        for part in layer.parts
        if part.product and t == 1 and not multiplies_in_float8(*part.product, fp8_min_features)
    } - {part.name.rpartition(".")[0] for part in layer.parts if part.adapts}
    extra = config.extra_passes(plain, t == 1)
    if extra is None:
        return forward, backward
    for table, parts in ((extra.stream, _parts(strategy)), (extra.heads, t)):
        for applies, more_forward, more_backward in table:
            forward += applies * more_forward * layer.gives.elements / parts
            backward += applies * more_backward * layer.gives.elements / parts
    if not of_role(layer, "gate"):
        # The bias of fc1 is summed in the kernel of the activation's backward.
        backward -= sum(given_elements(part) for part in layer.parts if part.name == "mlp.fc1" and part.name in plain)
    return forward, backward


def _parts(strategy: Strategy) -> int:
    """Return the number of parts that activations outside the products are split into."""
    return 1 if strategy.mode == "1d" else strategy.degree("tp")
