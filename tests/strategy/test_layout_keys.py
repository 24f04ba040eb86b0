"""The cheap key of a token layout, compared with the layout itself."""

from itertools import product

import pytest

from vitpar import model_config
from vitpar.planner.search.space import Space
from vitpar.strategy import token_layout
from vitpar.strategy.layout import token_layout_key


@pytest.mark.parametrize("ranks", [8, 12, 16, 64])
def test_layout_keys_are_equal_exactly_if_layouts_are(ranks: int) -> None:
    config = model_config("vit_custom", patch_size=4, embed_dim=96, depth=2, num_heads=12)
    strategies = Space(config, ranks, (ranks,), flags=("sp", "2d", "2.5d", "3d")).strategies(ranks)
    first = {token_layout_key(strategy): strategy for strategy in reversed(strategies)}
    for strategy in strategies:
        assert token_layout(strategy) == token_layout(first[token_layout_key(strategy)]), strategy
    for one, other in product(first.values(), repeat=2):
        assert one == other or token_layout(one) != token_layout(other), (one, other)
