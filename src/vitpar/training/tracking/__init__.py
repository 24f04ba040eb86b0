"""Experiment trackers (TensorBoard, W&B, trackio), each in a separate process that cannot stop or slow a run."""
