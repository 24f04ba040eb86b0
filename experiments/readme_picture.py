"""Draw the picture of the README: the ranks of pp2xtp2xdp2 and the timeline of its step.

    python experiments/readme_picture.py > docs/images/pp2xtp2xdp2.svg

Takes seconds. The places of ranks follow from the strategy, the timeline from the predicted price of ViT-B on 8 H100.
"""

from __future__ import annotations

import re
from dataclasses import replace

from vitpar.models import model_config
from vitpar.pages import svg
from vitpar.planner.cost.price import price
from vitpar.planner.report.timeline import timeline
from vitpar.planner.sources import estimated_costs
from vitpar.strategy import parse, place_of_rank, validate
from vitpar.strategy.layout import place

MESH, MODEL, BATCH, MICROBATCHES = "pp2xtp2xdp2", "vit_base_patch16_224", 512, 8
BATCH_COLOURS = ("#009e73", "#cc79a7")
"""One colour for each data-parallel half of the batch."""
STYLE = (
    "text { font: 12px sans-serif; fill: #222; text-anchor: middle } .left { text-anchor: start } "
    ".right { text-anchor: end } .small { font-size: 11px; fill: #555 } .big { font-size: 15px; font-weight: bold } "
    ".number { font-size: 10px } .number[fill='#fff'] { fill: #fff } .grid { stroke: #ddd } .idle { fill: #eee } "
    ".event { stroke: #fff; stroke-width: .5 }"
)


def draw_ranks(top: float) -> list[str]:
    """Return SVG of the ranks: a row for each pipeline stage, a box for each tensor-parallel group.

    top: y coordinate.
    """
    plan = parse(MESH)
    size, gap, row_height = 74, 16, 66
    parts = []
    for rank in range(plan.world_size):
        stage, stage_rank = place_of_rank(plan, rank)
        at = place(plan.strategy, stage_rank)
        x = svg.LEFT + at["dp"] * (2 * size + 3 * gap) + at["j"] * size
        y = top + stage * row_height
        if at["j"] == 0:
            parts.append(
                f'<rect x="{x - 4}" y="{y - 4}" width="{2 * size + 4}" height="52" rx="6" fill="none" stroke="#222"/>'
            )
        parts.append(
            f'<rect x="{x}" y="{y}" width="{size - 4}" height="44" rx="4" fill="{BATCH_COLOURS[at["dp"]]}" '
            'fill-opacity=".25"/>'
            f'<text x="{x + size / 2 - 2}" y="{y + 20}" class="big">{rank}</text>'
            f'<text x="{x + size / 2 - 2}" y="{y + 36}" class="small">tp {at["j"]}, dp {at["dp"]}</text>'
        )
        if at["dp"] == at["j"] == 0:
            parts.append(f'<text x="{svg.LEFT - 12}" y="{y + 27}" class="right">stage {stage}</text>')
    x = svg.LEFT + 4 * size + 6 * gap
    facts = (
        "Row: a pipeline stage, half of the layers.",
        "Box: a tensor-parallel group. It splits the",
        "heads and hidden features of a layer.",
        "Colour: half of the batch. Stages exchange",
        "activations; ranks with equal tp index and",
        "different colours sum gradients.",
    )
    return parts + [
        f'<text x="{x}" y="{top + 8 + 20 * line}" class="left">{words}</text>' for line, words in enumerate(facts)
    ]


def draw_step(top: float) -> list[str]:
    """Return SVG of the timeline of a 1F1B step.

    top: y coordinate.
    """
    config = model_config(MODEL)
    costs = estimated_costs(config, "8xH100", "bf16", compiled=True)
    plan = validate(replace(parse(MESH), microbatches=MICROBATCHES), config, BATCH)
    priced = price(plan, costs, BATCH)
    drawn = re.search("<svg[^>]*>(.*)</svg>", svg.timeline(timeline(priced, costs), priced.seconds), re.DOTALL)
    assert drawn
    rows = drawn[1].replace(">pp ", ">stage ").replace('text-anchor="end"', 'class="right"')
    title = (
        f"A step of {MODEL} on 8 H100, as predicted: {MICROBATCHES} micro-batches, 1F1B, "
        "<tspan fill='#0072b2'>forward</tspan> and <tspan fill='#2a8fcb'>backward</tspan>"
    )
    return [
        f'<text x="{svg.LEFT}" y="{top - 10}" class="left">{title}</text>',
        f'<g transform="translate(0 {top})">{rows}</g>',
    ]


def main() -> None:
    """Print the picture as SVG."""
    height = 270
    print(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {svg.WIDTH} {height}" role="img" '
        f'aria-label="Ranks and timeline of {MESH}"><style>{STYLE}</style>'
        f'<rect width="{svg.WIDTH}" height="{height}" rx="8" fill="#fff"/>'
    )
    print(*draw_ranks(16), *draw_step(180), "</svg>", sep="\n")


if __name__ == "__main__":
    main()
