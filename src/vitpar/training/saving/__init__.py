"""Saves checkpoints during a run, and resumes a run from them."""
