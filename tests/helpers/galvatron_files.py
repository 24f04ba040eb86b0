"""Galvatron strategy files, as its own tools write them."""

from typing import Any


def column(*parts: tuple[int, int]) -> str:
    """Return the comma-separated list of repeated values: `(2, 3), (1, 2)` gives "2,2,2,1,1"."""
    return ",".join(str(value) for value, times in parts for _ in range(times))


HUGE = {  # vit-huge on 4 ranks, as Galvatron's search wrote it
    "pp_deg": 1,
    "tp_sizes_enc": column((2, 32)),
    "tp_consecutive_flags": column((1, 32)),
    "dp_types_enc": column((0, 32)),
    "use_sp": column((0, 32)),
    "checkpoint": column((0, 32)),
    "global_bsz": 160,
    "chunks": 1,
    "pp_division": "32",
    "pipeline_type": "pipedream_flush",
    "default_dp_type": "zero2",
    "vtp": 2,
    "vsp": 0,
}
OLD = {  # format of 2022, for 16 ranks
    "pp_deg": 2,
    "tp_sizes_enc": column((1, 24)),
    "tp_consecutive_flags": column((1, 24)),
    "dp_types_enc": "1,1,1,1,1,1,0,0,0,0,0,0,1,1,1,1,1,1,0,0,0,0,0,0",
    "global_bsz": 64,
    "chunks": 2,
}
LAYERWISE = {  # for 8 ranks
    "pp_deg": 1,
    "tp_sizes_enc": column((2, 32)),
    "tp_consecutive_flags": column((1, 32)),
    "dp_types_enc": column((1, 29), (0, 3)),
    "use_sp": column((0, 32)),
    "checkpoint": column((1, 6), (0, 26)),
    "global_bsz": 16,
    "chunks": 1,
    "pp_division": "32",
    "pipeline_type": "pipedream_flush",
    "default_dp_type": "zero2",
    "vtp": 4,
    "vsp": 0,
    "embed_sdp": 1,
}
MIXED = {  # for 24 ranks: degrees that are not powers of two, strided tp, unequal stages, the newest keys
    "pp_deg": 2,
    "tp_sizes_enc": "3,3,1,12,4,6,2",
    "tp_consecutive_flags": "0,1,1,1,0,0,0",
    "dp_types_enc": "0,1,0,0,1,0,1",
    "use_sp": "0,0,1,0,0,0,0",
    "checkpoint": "1,0,0,1,1,0,0",
    "global_bsz": 144,
    "chunks": 3,
    "pp_division": "3,4",
    "pipeline_type": "gpipe",
    "default_dp_type": "ddp",
    "vtp": 1,
    "vsp": 1,
    "embed_sdp": 1,
    "cp_sizes_enc": "1,1,1,1,1,1,1",
    "vcp": 1,
}
SMALL = {  # for 8 ranks: 4 blocks
    "pp_deg": 2,
    "tp_sizes_enc": "2,2,2,2",
    "tp_consecutive_flags": "1,1,1,1",
    "dp_types_enc": "0,0,0,0",
    "use_sp": "0,0,0,0",
    "global_bsz": 16,
    "chunks": 2,
    "vtp": 2,
}
BERT_LARGE = {  # shipped for 8 ranks
    **HUGE,
    "tp_sizes_enc": column((2, 24)),
    **{
        key: column((value, 24)) for key, value in (("tp_consecutive_flags", 1), ("dp_types_enc", 0), ("checkpoint", 0))
    },
    "use_sp": column((0, 24)),
    "global_bsz": 128,
    "chunks": 3,
    "pp_division": "24",
}
T5_LARGE = {  # sample of 2022 for 8 ranks: 24 layers of the encoder, then 24 of the decoder
    "pp_deg": 2,
    "tp_sizes_enc": column((2, 12), (1, 36)),
    "tp_consecutive_flags": column((1, 48)),
    "dp_types_enc": column((0, 36), (1, 12)),
    "global_bsz": 8,
    "chunks": 2,
    "pp_division": "26,22",
}
T5_3B = {  # shipped for 8 ranks
    **HUGE,
    "tp_sizes_enc": column((1, 48)),
    "tp_consecutive_flags": column((1, 48)),
    "dp_types_enc": column((1, 22), (0, 7), (1, 19)),
    "use_sp": column((0, 48)),
    "checkpoint": column((1, 48)),
    "global_bsz": 1024,
    "pp_division": "48",
    "vtp": 1,
}


def of_2022(pp: int, tp: str, sharded: str, batch_size: int, division: str = "") -> dict[str, Any]:
    """Return a file for 8 ranks in the format of 2022. Columns as text: tp degrees, 1 for sharded layers."""
    ones = column((1, tp.count(",") + 1))
    keys = {"pp_deg": pp, "tp_sizes_enc": tp, "tp_consecutive_flags": ones, "dp_types_enc": sharded}
    return {**keys, "global_bsz": batch_size, "chunks": 1, **({"pp_division": division} if division else {})}


BERT_HUGE_8GB = of_2022(2, column((2, 32)), column((0, 15), (1, 1), (0, 15), (1, 1)), 8)
BERT_HUGE_12GB = of_2022(1, column((2, 32)), column((0, 16), (1, 16)), 16)
SWIN_48 = of_2022(2, column((1, 44), (2, 2), (4, 2)), column((0, 2), (1, 4), (0, 42)), 64, "19,29")
SWIN_32_8GB = of_2022(1, column((1, 4), (2, 24), (1, 2), (4, 2)), column((1, 32)), 48)
SWIN_HUGE = {  # shipped for 8 ranks, there with 41 chunks of unequal sizes
    **of_2022(8, column((1, 48)), column((0, 48)), 1024, "3,7,7,7,7,7,7,3"),
    "chunks": 32,
    "pipeline_type": "pipedream_flush",
    "default_dp_type": "zero2",
    "vtp": 1,
}
FILES = {"huge": (HUGE, 4), "old": (OLD, 16), "layerwise": (LAYERWISE, 8), "mixed": (MIXED, 24), "small": (SMALL, 8)}
