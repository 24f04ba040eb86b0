"""Limits on settings, files, URLs and ports.

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
MAX_BLOCKS = _most(1_024, "blocks of a model")
MAX_CLASSES = _most(1_000_000, "classes of a model or data set")
MAX_WIDTH = _most(131_072, "`embed_dim` and `mlp_hidden_dim` of a model")
MAX_IMAGE_SIZE = _most(16_384, "image and patch size of a model", "pixels")
MAX_CHANNELS = _most(1_024, "channels of a model's images")
MAX_TOKENS = _most(1 << 20, "tokens of an image or a sequence of text")
MAX_BATCH_SIZE = _most(1 << 24, "images in a global batch")
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
MAX_PLAN_BYTES = _most(4 * MIB, "plan (JSON), of vitpar or Galvatron", "bytes")
MAX_PROFILE_BYTES = _most(8 * MIB, "hardware or model profile (JSON)", "bytes")
MAX_TRACK_FILE_BYTES = _most(4 * KIB, "identifier of a run for trackers (`track.json`)", "bytes")
MAX_JSON_BYTES = _most(12 * MIB, "other JSON file: configuration, manifest, weight map, class names", "bytes")
MAX_TEXT_BYTES = _most(1024 * MIB, "text file: list of images, map of a zip file, log or metrics of a run", "bytes")

# Numbers in profiles of machines and models, and in clusters.
MAX_MEASURE = _most(1e30, "seconds and other measurements in a profile; the minimum is 1 over this")
MAX_AMOUNT = _most(1 << 62, "bytes, elements and operations in a profile or cluster file")
MAX_RATE = _most(1e18, "bytes and operations a second in a cluster file; the minimum is 1")
MIN_SUSTAINED = _most(1e-3, "sustained part of the rates in a cluster file (this is a minimum)")

# Checkpoints and weights.
MAX_INT64 = _most((1 << 63) - 1, "elements along a dimension, or bytes of a file, in a checkpoint's index")
MAX_INDEX_BYTES = _most(256 * MIB, "index of a checkpoint (JSON)", "bytes")
MAX_HUB_BYTES = _most(512 * 1024 * MIB, "weights that are downloaded from a hub", "bytes")

# Shards and other files of images.
MAX_ARCHIVE_BYTES = _most(192 * MIB, "archive of CIFAR, or one of its files", "bytes")
MAX_KIT_BYTES = _most(16 * MIB, "ImageNet's development kit", "bytes")

# Text.
MAX_VOCABULARY = _most(1 << 24, "tokens in a vocabulary")
MAX_TOKENIZER_BYTES = _most(64 * MIB, "tokenizer.json", "bytes")

# Images.
MAX_IMAGE_BYTES = _most(256 * MIB, "encoded image", "bytes")
MAX_PIXELS = _most(1 << 27, "pixels of a JPEG before decoding")
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
        "Largest settings and files that vitpar accepts; others are refused in a sentence. To read one from Python:",
        *("", "```", "python -c 'import vitpar.limits; print(vitpar.limits.MAX_RANKS)'", "```", ""),
        "Written by `make docs` from `src/vitpar/limits.py`.",
    ]
    return "\n".join(["# Limits", "", *about, "", "| input | maximum |", "|---|---|", *rows]) + "\n"
