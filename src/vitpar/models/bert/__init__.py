"""BERT: configuration, layers, initial values, and conversion from and to transformers."""
