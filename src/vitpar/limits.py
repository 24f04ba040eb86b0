"""Largest settings and files that vitpar accepts; others are refused in a sentence."""

MAX_RANKS = 65_536
"""Ranks of a plan or a world."""
MAX_BLOCKS = 1_024
"""Blocks of a model."""
MAX_CLASSES = 1_000_000
"""Classes of a model or data set."""
MAX_WIDTH = 131_072
"""`embed_dim` and `mlp_hidden_dim` of a model."""
MAX_IMAGE_SIZE = 16_384
"""Image and patch size of a model in pixels."""
MAX_CHANNELS = 1_024
"""Channels of a model's images."""
MAX_TOKENS = 1 << 20
"""Tokens of an image or a sequence of text."""
MAX_BATCH_SIZE = 1 << 24
"""Images in a global batch."""
MAX_COUNT = 1 << 53
"""Steps, epochs and other counts in a recipe."""
MAX_MEASURE = 1e30
"""Seconds and other measurements in a profile; the minimum is 1 over this."""
MAX_AMOUNT = 1 << 62
"""Bytes, elements and operations in a profile or cluster file."""
MAX_TOML_BYTES = 256 << 10
"""Recipe or cluster file in bytes."""
MAX_JSON_BYTES = 256 << 20
"""Any JSON file in bytes."""
MAX_PIXELS = 1 << 27
"""Pixels of a JPEG before decoding."""
MAX_DECODED_BYTES = 128 << 20
"""Decoded or resized image at 3 bytes a pixel; a larger JPEG is decoded at half its size."""
MAX_QUOTED_CHARS = 200
"""Characters of input that a message quotes."""
