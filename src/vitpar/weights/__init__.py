"""Weights as files: their layout, out of checkpoints, in from elsewhere, and into the parameters of a run."""
