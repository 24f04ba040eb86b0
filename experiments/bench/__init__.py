"""What the benchmark programs beside this folder share: both contenders of every case, and how they are timed."""
