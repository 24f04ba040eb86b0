"""Parts of a backward that frozen parameters leave, by which runtime, prices and `vitpar plan` go."""

import pytest

from vitpar import model_config
from vitpar.strategy import Execution, parse
from vitpar.strategy.freezing import listed_parameters

CONFIG = model_config("vit_custom", image_size=8, patch_size=4, embed_dim=8, depth=2, num_heads=2)


@pytest.mark.parametrize(
    ("frozen", "expected"),
    [
        ("", ("weights", "all", "all", "all")),
        ("embed", ("nothing", "weights", "all", "all")),
        ("embed, 0-1", ("nothing", "nothing", "nothing", "weights")),
        ("0, head", ("weights", "inputs", "all", "inputs")),
        ("embed, 1", ("nothing", "weights", "inputs", "all")),
        ("embed, *, !blocks.1.norm1.bias", ("nothing", "nothing", "weights", "all")),
    ],
)
def test_backward_ends_at_the_lowest_trained_layer(frozen: str, expected: tuple[str, ...]) -> None:
    named = listed_parameters(frozen, CONFIG) if frozen else frozenset()
    found = list(Execution(8, frozen=named).layers(parse("fsdp2"), CONFIG).values())
    assert tuple(one.backward for one in found) == expected
    for one in found:
        assert one.trained == (one.backward in ("all", "weights")) == (one.reduced != "never")
        assert one.passes_gradient == (one.backward in ("all", "inputs"))
        assert one.gathers_in_backward == (one.reshard_after_forward and one.backward != "nothing")
