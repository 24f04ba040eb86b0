"""Limits on what is read from files, URLs and ports that somebody else may have made.

Every reader of such input takes its numbers from here, so that a small file cannot ask for much memory or time.
`make docs` writes the table to docs/limits.md.
"""

KIB, MIB = 1 << 10, 1 << 20

# Plans, models and recipes.
MAX_RANKS = 65_536
MAX_LAYOUT_PARTS = 1 << 20
MAX_BLOCKS = 1_024
MAX_CLASSES = 1_000_000
MAX_WIDTH = 131_072
MAX_IMAGE_SIZE = 16_384
MAX_CHANNELS = 1_024
MAX_TOKENS = 1 << 20
MAX_BATCH_SIZE = 1 << 24
MAX_STRATEGY_CHARS = 64 * KIB
MAX_POLICY_OPERATIONS = 64
MAX_ALTERNATIVES = 32
MAX_COUNT = 1 << 53
MAX_MINUTES = 1_000_000
MAX_SAMPLES = 1 << 40
MAX_BUFFERED_SAMPLES = 1 << 20
MAX_WORKERS = 1_024
MAX_TOML_BYTES = 256 * KIB
MAX_TOML_DOTS = 8
MAX_PLAN_BYTES = 4 * MIB
MAX_PROFILE_BYTES = 8 * MIB
MAX_JSON_BYTES = 64 * MIB
MAX_TEXT_BYTES = 1024 * MIB
MAX_LINE_BYTES = 64 * KIB

# Numbers in profiles of machines and models, and in clusters.
MAX_MEASURE = 1e30
MAX_AMOUNT = 1 << 62
MAX_RATE = 1e18
MIN_SUSTAINED = 1e-3

# Checkpoints and weights.
MAX_TENSOR_DIMS = 4
MAX_TENSOR_PARTS = MAX_RANKS
MAX_INT64 = (1 << 63) - 1
MAX_INDEX_BYTES = 256 * MIB
MAX_ZIP_LISTING_BYTES = 16 * MIB
MAX_PICKLED_WORD_CHARS = 16 * KIB

# Shards and other files of images.
MAX_SHARDS = 500_000
MAX_URL_CHARS = 8 * KIB
MAX_BRACE_DEPTH = 16
MAX_MEMBERS = 10_000_000
MAX_TAR_NAME_BYTES = 8 * KIB
MAX_TAR_EXTENDED_BYTES = 64 * KIB
MAX_TAR_PADDING_BYTES = 16 * MIB
MAX_LABEL_BYTES = MIB
MAX_RECORD_BYTES = 512 * MIB
MAX_ROWS = 1 << 21

# Images.
MAX_IMAGE_BYTES = 256 * MIB
MAX_PIXELS = 1 << 27
MAX_SCANS = 100
MAX_DECODED_BYTES = 128 * MIB

# Messages.
MAX_QUOTED_CHARS = 200

TABLE = (
    ("ranks of a plan or a world", MAX_RANKS, ""),
    ("ranks of a stage, times the different strategies of a plan", MAX_LAYOUT_PARTS, ""),
    ("blocks of a model", MAX_BLOCKS, ""),
    ("classes of a model or a data set", MAX_CLASSES, ""),
    ("width of a model, and features inside its MLP", MAX_WIDTH, ""),
    ("image and patch size of a model", MAX_IMAGE_SIZE, "pixels"),
    ("channels of a model's images", MAX_CHANNELS, ""),
    ("tokens of a model's image", MAX_TOKENS, ""),
    ("images of a global batch", MAX_BATCH_SIZE, ""),
    ("strategy string", MAX_STRATEGY_CHARS, "characters"),
    ("operations of an augmentation policy", MAX_POLICY_OPERATIONS, ""),
    ("strategies in parallel.otherwise", MAX_ALTERNATIVES, ""),
    ("steps, epochs and other counts of a recipe", MAX_COUNT, ""),
    ("time limits and intervals of a recipe", MAX_MINUTES, "minutes"),
    ("samples of a stream, and of a shuffling window", MAX_SAMPLES, ""),
    ("samples that a rank mixes at a time from a stream", MAX_BUFFERED_SAMPLES, ""),
    ("decoding threads of a rank", MAX_WORKERS, ""),
    ("recipe or cluster file (TOML)", MAX_TOML_BYTES, "bytes"),
    ("dots in a row in a TOML key", MAX_TOML_DOTS, ""),
    ("plan as JSON, vitpar's and Galvatron's", MAX_PLAN_BYTES, "bytes"),
    ("profile of a machine or a model (JSON)", MAX_PROFILE_BYTES, "bytes"),
    ("other JSON file: configuration, manifest, weight map; names of classes", MAX_JSON_BYTES, "bytes"),
    ("text file: list of images, map of a zip file", MAX_TEXT_BYTES, "bytes"),
    ("line of such a file", MAX_LINE_BYTES, "bytes"),
    ("seconds and other measures in a profile; the least is 1 over this", MAX_MEASURE, ""),
    ("bytes, elements and operations in a profile or a cluster", MAX_AMOUNT, ""),
    ("bytes and operations a second in a cluster; the least is 1", MAX_RATE, ""),
    ("part of the rates that is sustained in a cluster, at least", MIN_SUSTAINED, ""),
    ("dimensions of a tensor in a checkpoint", MAX_TENSOR_DIMS, ""),
    ("parts of a tensor in a checkpoint", MAX_TENSOR_PARTS, ""),
    ("elements along a dimension, and bytes of a file, in a checkpoint's index", MAX_INT64, ""),
    ("index of a checkpoint", MAX_INDEX_BYTES, "bytes"),
    ("listing of a file of torch.save", MAX_ZIP_LISTING_BYTES, "bytes"),
    ("word in a file of torch.save, between spaces", MAX_PICKLED_WORD_CHARS, "characters"),
    ("shards of a split or a stream", MAX_SHARDS, ""),
    ("URL or pattern of URLs", MAX_URL_CHARS, "characters"),
    ("braces within braces of a pattern of URLs", MAX_BRACE_DEPTH, ""),
    ("members of a tar file, records of a TFRecord file", MAX_MEMBERS, ""),
    ("long name in a tar file", MAX_TAR_NAME_BYTES, "bytes"),
    ("extended header in a tar file, such as for extended attributes", MAX_TAR_EXTENDED_BYTES, "bytes"),
    ("zeros behind the end of a tar file", MAX_TAR_PADDING_BYTES, "bytes"),
    ("label or JSON of a sample", MAX_LABEL_BYTES, "bytes"),
    ("record of a TFRecord file, group of rows of a Parquet file, content of an archive", MAX_RECORD_BYTES, "bytes"),
    ("rows of a Parquet file", MAX_ROWS, ""),
    ("encoded image", MAX_IMAGE_BYTES, "bytes"),
    ("pixels of a JPEG as stored", MAX_PIXELS, ""),
    ("scans of a JPEG", MAX_SCANS, ""),
    (
        "decoded or resized image, at 3 bytes a pixel; a larger JPEG is decoded at half its size",
        MAX_DECODED_BYTES,
        "bytes",
    ),
    ("piece of the input that a message quotes", MAX_QUOTED_CHARS, "characters"),
)
"""What is limited, the most that is accepted, and its unit."""


def markdown() -> str:
    """Return the page docs/limits.md."""
    rows = [f"| {what} | {most:,}{f' {unit}' if unit else ''} |" for what, most, unit in TABLE]
    about = "What vitpar reads, and the most that it accepts. Written by `make docs` from `src/vitpar/limits.py`."
    return "\n".join(["# Limits", "", about, "", "| what is read | at most |", "|---|---|", *rows]) + "\n"
