"""T5: configuration, layers, initial values, and conversion from and to transformers."""
