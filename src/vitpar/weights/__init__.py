"""Weights as files: their layout, export from checkpoints, import from other libraries, and loading into a run."""
