"""Shared parts of the benchmark scripts: the contenders, and how they are timed."""
