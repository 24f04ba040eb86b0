"""Targets: readers of vitpar that take untrusted input, as `module:class` by name."""

TARGETS = {
    name.lower(): f"fuzzing.readers.{module}:{name}"
    for module, names in {
        "images": "Image",
        "shards": "Tar Packed",
        "streams": "Stream Http",
        "sources": "TFRecord Parquet Zip List Cifar ImageNet",
        "checkpoints": "Checkpoint",
        "weights": "Weights Pickle Adapters",
        "recipes": "Recipe",
        "plans": "Strategy Plan Words",
        "profiles": "Profile",
        "runs": "Run",
    }.items()
    for name in names.split()
}
