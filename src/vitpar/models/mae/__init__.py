"""Masked autoencoders (arXiv 2111.06377): configuration and layers."""
