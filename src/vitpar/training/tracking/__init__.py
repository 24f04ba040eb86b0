"""Experiment trackers (TensorBoard, W&B, trackio), each on a daemon thread for which a run does not wait."""
