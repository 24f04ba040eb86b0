"""Targets: readers of vitpar that take untrusted input, as `module:class` by name."""

TARGETS = {
    name: f"fuzzing.readers.{path}"
    for name, path in {
        "image": "images:Images",
        "tar": "shards:ForeignShards",
        "packed": "shards:PackedShards",
        "index": "shards:Index",
        "stream": "streams:LocalStream",
        "http": "streams:HttpStream",
        "tfrecord": "sources:TFRecords",
        "parquet": "sources:Parquet",
        "zip": "sources:Zips",
        "list": "sources:Lists",
        "cifar": "sources:Cifar",
        "imagenet": "sources:ImageNet",
        "checkpoint": "checkpoints:CheckpointFolder",
        "weights": "weights:Weights",
        "pickle": "weights:Pickles",
        "recipe": "recipes:RecipeFile",
        "strategy": "plans:StrategyText",
        "plan": "plans:PlanFile",
        "words": "plans:Words",
        "profile": "profiles:ProfileFiles",
        "run": "runs:RunFolders",
    }.items()
}
