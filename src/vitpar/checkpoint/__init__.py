"""Checkpoints: the state of a run in a folder that any plan can read, whatever plan wrote it."""
