"""Swin Transformers: configuration and layers."""
