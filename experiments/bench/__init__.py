"""Shared parts of the benchmark programs: both contenders of every case, and how they are timed."""
