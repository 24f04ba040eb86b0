"""Swin Transformers: configuration (without torch) and layers."""
