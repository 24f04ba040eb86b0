"""A CUDA GPU that does not exist: torch and its compiler see one, and tensors on it have no values."""
