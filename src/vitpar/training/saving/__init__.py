"""Saving of checkpoints during a run, and resuming a run from them."""
