"""Detects and reports hangs, losses and gradients that are not finite, and ranks that disagree."""
