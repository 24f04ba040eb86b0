"""Drawing of the ranks in `vitpar plan` and `vitpar train`."""

import pytest

from vitpar.strategy import parse
from vitpar_cli.rank_grid import COLOURS, draw_ranks

DRAWN = {
    # Stages in rows, tensor-parallel ranks in a box.
    ("pp2xtp2xdp2", 80): """
             dp 0         dp 1
          tp 0  tp 1   tp 0  tp 1
        ┌────────────┬────────────┐
stage 0 │  0     2   │  1     3   │
        ├────────────┼────────────┤
stage 1 │  4     6   │  5     7   │
        └────────────┴────────────┘
""",
    # Data-parallel parts are stacked if they are too wide.
    ("dp4xtp2", 30): """
       tp 0  tp 1
     ┌────────────┐
dp 0 │  0     1   │
dp 1 │  2     3   │
""",
    ("pp2xdp2xtp4+2d", 80): """
                 dp 0       dp 1
               j 0  j 1   j 0  j 1
             ┌──────────┬──────────┐
stage 0  i 0 │  0    1  │  4    5  │
         i 1 │  2    3  │  6    7  │
             ├──────────┼──────────┤
stage 1  i 0 │  8    9  │ 12   13  │
         i 1 │ 10   11  │ 14   15  │
             └──────────┴──────────┘
""",
    ("tp8+3d", 80): """
        i 0        i 1
      k 0  k 1   k 0  k 1
    ┌──────────┬──────────┐
j 0 │  0    1  │  4    5  │
j 1 │  2    3  │  6    7  │
    └──────────┴──────────┘
""",
    # A box for each depth, stacked if they are too wide.
    ("tp12+2.5d", 80): """
        d 0        d 1        d 2
      j 0  j 1   j 0  j 1   j 0  j 1
""",
    ("tp12+2.5d", 30): """
           j 0  j 1
         ┌──────────┐
d 0  i 0 │  0    1  │
     i 1 │  2    3  │
         ├──────────┤
d 1  i 0 │  4    5  │
     i 1 │  6    7  │
         ├──────────┤
d 2  i 0 │  8    9  │
     i 1 │ 10   11  │
         └──────────┘
""",
    # One line per strategy of a layerwise plan.
    ("pp2: embed=fsdp8, 0=tp4xdp2, 1=fsdp8, 2-3=tp8+2.5d, *=tp2xdp4+sp", 80): """
ranks of a stage, counted from 0; | separates parts of the batch
embed, 1  fsdp8       0 | 1 | 2 | 3 | 4 | 5 | 6 | 7
0         tp4xdp2     0 2 4 6 | 1 3 5 7
2-3       tp8+2.5d    0 1 | 2 3 | 4 5 | 6 7
*         tp2xdp4+sp  0 4 | 1 5 | 2 6 | 3 7
""",
    ("pp1: 0=tp8xdp8, *=fsdp64+ckpt.selective+offload", 40): """
ranks; | separates parts of the batch
0  tp8xdp8
  0 8 … 56 | 1 9 … 57 | 2 10 … 58 | …
*  fsdp64+ckpt.selective+offload
  0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | …
""",
    # Many ranks are summarised by axis.
    ("dp64xtp2", 40): """
dp:   0 2 … 126 | 1 3 … 127
tp:   0 1 | 2 3 | 4 5 | 6 7 | 8 9 | …
""",
    ("tp4xpp2xdp32+2d", 40): """
i:    0 128 | 1 129 | 2 130 | 3 131 | …
j:    0 64 | 1 65 | 2 66 | 3 67 | …
pp:   0 32 | 1 33 | 2 34 | 3 35 | …
dp:   0 1 … 31 | 32 33 … 63 | …
""",
}


@pytest.mark.parametrize(("strategy", "width"), DRAWN)
def test_ranks_are_drawn(strategy: str, width: int) -> None:
    expected = DRAWN[strategy, width].splitlines()[1:]
    assert str(draw_ranks(parse(strategy), width)).splitlines()[: len(expected)] == expected


def test_colours_mark_parts_of_the_batch() -> None:
    def colours(strategy: str) -> list[str]:
        """Return the colours of the ranks, line by line."""
        text = draw_ranks(parse(strategy), 80)
        return [str(span.style) for span in text.spans if span.style in COLOURS]

    assert colours("dp2xtp2") == ["cyan", "magenta"]
    assert colours("tp4+2d") == ["cyan", "magenta"]  # the rows of the 2d grid split the batch
    assert colours("dp2xtp4+2d") == ["cyan", "yellow", "magenta", "green"]
    assert colours("pp1: 0=dp2xtp2, *=tp4") == ["cyan", "magenta", "cyan"]


WIDE = "pp2: 0=tp8xdp8, 2=tp8xdp8, 4=tp8xdp8, 6=tp8xdp8, 8=tp8xdp8, 10=tp8xdp8, 12=tp8xdp8, *=tp64+2d+ckpt.selective"


@pytest.mark.parametrize("width", [40, 80, 120])
def test_grid_keeps_to_its_width(width: int) -> None:
    for strategy in (
        *("dp8", "pp8", "tp8", "pp2xdp2xfsdp2xtp2", "pp4xtp4xdp4", "fsdp64", "pp2xdp64"),
        *("tp4+2d", "pp2xdp2xtp16+2d", "tp27+3d", "dp2xtp64+3d", "tp18xdp2+2.5d", "pp1: 0=dp64, *=tp2xdp32", WIDE),
    ):
        assert max(map(len, str(draw_ranks(parse(strategy), width)).splitlines())) <= width, strategy
