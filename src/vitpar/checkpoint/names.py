"""What things are called in checkpoints: the files beside the tensors, and how tensors' names begin."""

RECIPE, PLAN, CONFIG = "recipe.toml", "plan.json", "config.json"
PARAMETERS, MOMENTS, AVERAGES = "model.", "optimizer.", "ema."
