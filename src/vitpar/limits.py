"""Limits on input from untrusted files, URLs and ports.

Every reader of such input takes its limits from here, so that a small file cannot use much memory or time.
`make docs` writes the table to docs/limits.md.
"""

from typing import TypeVar

Number = TypeVar("Number", int, float)
KIB, MIB = 1 << 10, 1 << 20
TABLE: list[tuple[str, int | float, str]] = []
"""Rows of the table of limits: quantity, largest accepted value, and unit."""


def _most(number: Number, what: str, unit: str = "") -> Number:
    """Add a row to `TABLE` and return `number`.

    number: largest accepted value.
    what: quantity, for docs/limits.md.
    unit: unit of `number`; empty for a count.
    """
    TABLE.append((what, number, unit))
    return number


# Plans, models and recipes.
MAX_RANKS = _most(65_536, "ranks of a plan or a world")
MAX_LAYOUT_PARTS = _most(1 << 20, "ranks of a stage, times distinct strategies of a plan")
MAX_BLOCKS = _most(1_024, "blocks of a model")
MAX_CLASSES = _most(1_000_000, "classes of a model or data set")
MAX_WIDTH = _most(131_072, "`embed_dim` and `mlp_hidden_dim` of a model")
MAX_IMAGE_SIZE = _most(16_384, "image and patch size of a model", "pixels")
MAX_CHANNELS = _most(1_024, "channels of a model's images")
MAX_TOKENS = _most(1 << 20, "tokens of an image or a sequence of text")
MAX_BATCH_SIZE = _most(1 << 24, "images in a global batch")
MAX_STRATEGY_CHARS = _most(64 * KIB, "length of a strategy string", "characters")
MAX_POLICY_OPERATIONS = _most(64, "operations of an augmentation policy")
MAX_ALTERNATIVES = _most(32, "strategies in `parallel.fallback_meshes`")
MAX_COUNT = _most(1 << 53, "steps, epochs and other counts in a recipe")
MAX_MINUTES = _most(1_000_000, "time limits and intervals in a recipe", "minutes")
MAX_SAMPLES = _most(1 << 40, "samples of a stream or of a shuffling window")
MAX_BUFFERED_SAMPLES = _most(1 << 20, "samples in a rank's shuffle buffer of a stream")
MAX_WORKERS = _most(1_024, "decoding threads of a rank")
MAX_TRACK_NAME_CHARS = _most(128, "`track.project` and `track.name`", "characters")
MAX_TARGETS = _most(1_024, "patterns in `lora.targets`")
MAX_TOML_BYTES = _most(256 * KIB, "recipe or cluster file (TOML)", "bytes")
MAX_TOML_DOTS = _most(8, "consecutive dots in a TOML key")
MAX_PLAN_BYTES = _most(4 * MIB, "plan (JSON), of vitpar or Galvatron", "bytes")
MAX_PROFILE_BYTES = _most(8 * MIB, "hardware or model profile (JSON)", "bytes")
MAX_TRACK_FILE_BYTES = _most(4 * KIB, "identifier of a run for trackers (`track.json`)", "bytes")
# Python and pydantic take up to 40 bytes for each byte of JSON.
MAX_JSON_BYTES = _most(12 * MIB, "other JSON file: configuration, manifest, weight map, class names", "bytes")
MAX_TEXT_BYTES = _most(1024 * MIB, "text file: list of images, map of a zip file, log or metrics of a run", "bytes")
MAX_LINE_BYTES = _most(64 * KIB, "line of a text file", "bytes")

# Numbers in profiles of machines and models, and in clusters.
MAX_MEASURE = _most(1e30, "seconds and other measurements in a profile; the minimum is 1 over this")
MAX_AMOUNT = _most(1 << 62, "bytes, elements and operations in a profile or cluster file")
MAX_RATE = _most(1e18, "bytes and operations a second in a cluster file; the minimum is 1")
MIN_SUSTAINED = _most(1e-3, "sustained part of the rates in a cluster file (this is a minimum)")

# Checkpoints and weights.
MAX_TENSOR_DIMS = _most(4, "dimensions of a tensor in a checkpoint")
MAX_TENSOR_PARTS = _most(MAX_RANKS, "shards of a tensor in a checkpoint")
MAX_INT64 = _most((1 << 63) - 1, "elements along a dimension, or bytes of a file, in a checkpoint's index")
MAX_INDEX_BYTES = _most(
    256 * MIB, "index of a checkpoint; above the limit of JSON also a quarter of the checkpoint's other files", "bytes"
)
MAX_HEADER_BYTES = _most(
    16 * MIB,
    "header of a safetensors file, end of a Parquet file, list of members in a zip file; of a zip file of images "
    "also a quarter of the file",
    "bytes",
)
MAX_PICKLE_STEPS = _most(1 << 20, "instructions of a pickle")
MAX_PICKLED_WORD_CHARS = _most(16 * KIB, "word between spaces in a `torch.save` file", "characters")
MAX_HUB_FILES = _most(1_024, "files of weights that are downloaded from a hub")
MAX_HUB_BYTES = _most(512 * 1024 * MIB, "weights that are downloaded from a hub", "bytes")

# Shards and other files of images.
MAX_SHARDS = _most(500_000, "shards of a split or stream")
MAX_LISTED_OBJECTS = _most(1_000_000, "objects of a folder in object storage")
MAX_URL_CHARS = _most(8 * KIB, "length of a URL or pattern of URLs", "characters")
MAX_BRACE_DEPTH = _most(16, "nested braces in a pattern of URLs")
MAX_MEMBERS = _most(10_000_000, "members of a tar file, or records of a TFRecord file")
MAX_TAR_NAME_BYTES = _most(8 * KIB, "long name in a tar file", "bytes")
MAX_TAR_EXTENDED_BYTES = _most(64 * KIB, "extended header in a tar file, such as extended attributes", "bytes")
MAX_TAR_PADDING_BYTES = _most(16 * MIB, "zeros after the end of a tar file", "bytes")
MAX_LABEL_BYTES = _most(MIB, "label or JSON of a sample", "bytes")
MAX_RECORD_BYTES = _most(
    512 * MIB, "record of a TFRecord file, or row group of a Parquet file, which is also limited by its file", "bytes"
)
MAX_ARCHIVE_BYTES = _most(192 * MIB, "content of an archive of CIFAR, or one of its files", "bytes")
MAX_KIT_BYTES = _most(
    16 * MIB, "content of ImageNet's development kit; a quarter of it for the list of classes", "bytes"
)
MAX_ROWS = _most(1 << 21, "rows of a Parquet file")
MAX_FEATURE_BYTES = _most(32 * 1024 * MIB, "features of a file for `vitpar probe`, in memory", "bytes")

# Text.
MAX_VOCABULARY = _most(1 << 24, "tokens in a vocabulary")
MAX_TOKENIZER_BYTES = _most(64 * MIB, "tokenizer.json", "bytes")
MAX_TOKENIZER_COMMAS = _most(1 << 21, "commas in a tokenizer.json, which bound its values")
MAX_DOCUMENT_BYTES = _most(12 * MIB, "document in a line of JSON or a row of a Parquet file", "bytes")
MAX_DOCUMENTS = _most(1 << 28, "documents of a source of text")
MAX_TEXT_EXPANSION = _most(200, "unpacked size of a `.gz` file of text above 64 MiB, in units of its size")

# Images.
MAX_IMAGE_BYTES = _most(256 * MIB, "encoded image", "bytes")
MAX_PIXELS = _most(1 << 27, "pixels of a JPEG before decoding")
MAX_SCANS = _most(100, "scans of a JPEG")
MAX_DECODED_BYTES = _most(
    128 * MIB, "decoded or resized image, at 3 bytes a pixel; a larger JPEG is decoded at half its size", "bytes"
)
MAX_CACHE_BYTES = _most(1024 * 1024 * MIB, "decoded images in a machine's memory (`data.cache_gb`)", "bytes")

# Messages.
MAX_MESSAGE_BYTES = _most(64 * MIB, "message between ranks (JSON)", "bytes")
MAX_QUOTED_CHARS = _most(200, "quotation of the input in a message", "characters")


def markdown() -> str:
    """Return the page docs/limits.md."""
    rows = [f"| {what} | {most:,}{f' {unit}' if unit else ''} |" for what, most, unit in TABLE]
    about = [
        "Largest input that vitpar accepts. Larger input is refused with an error of one sentence. The limits keep",
        "small files from using much memory or time ([security.md](security.md)). To read one from Python:",
        *("", "```", "python -c 'import vitpar.limits; print(vitpar.limits.MAX_RANKS)'", "```", ""),
        "Written by `make docs` from `src/vitpar/limits.py`.",
    ]
    return "\n".join(["# Limits", "", *about, "", "| input | maximum |", "|---|---|", *rows]) + "\n"
