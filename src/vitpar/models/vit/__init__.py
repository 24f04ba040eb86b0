"""Vision Transformers: configuration and layers."""
