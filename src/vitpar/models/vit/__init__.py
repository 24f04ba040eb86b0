"""Vision Transformers: configuration (without torch) and layers."""
