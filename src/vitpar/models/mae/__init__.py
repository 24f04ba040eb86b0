"""Masked autoencoders (arXiv 2111.06377): configuration (without torch) and layers."""
