"""Dry bench: the work of a compiled block on a GPU, from the code that the compiler generates, without a GPU."""
