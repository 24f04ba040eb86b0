"""Targets: readers of vitpar that take untrusted input, as `module:class` by name."""

TARGETS = {
    "tar": "fuzzing.targets.shards:ForeignShards",
    "packed": "fuzzing.targets.shards:PackedShards",
    "index": "fuzzing.targets.shards:Index",
    "checkpoint": "fuzzing.targets.checkpoint:CheckpointFolder",
    "weights": "fuzzing.targets.weights:Weights",
    "pickle": "fuzzing.targets.weights:Pickles",
    "recipe": "fuzzing.targets.recipe:RecipeFile",
    "strategy": "fuzzing.targets.strategy:StrategyText",
    "words": "fuzzing.targets.strategy:Words",
    "plan": "fuzzing.targets.strategy:PlanFile",
    "profile": "fuzzing.targets.profile:ProfileFiles",
    "run": "fuzzing.targets.run:RunFolders",
    "tfrecord": "fuzzing.targets.sources:TFRecords",
    "parquet": "fuzzing.targets.sources:Parquet",
    "zip": "fuzzing.targets.sources:ZipsAndLists",
    "cifar": "fuzzing.targets.cifar:Cifar",
    "imagenet": "fuzzing.targets.imagenet:ImageNet",
    "image": "fuzzing.targets.image:Images",
    "stream": "fuzzing.targets.stream:LocalStream",
    "http": "fuzzing.targets.stream:HttpStream",
}
