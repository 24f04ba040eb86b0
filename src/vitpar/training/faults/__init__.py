"""Detection of hangs, of losses and gradients that are not finite, and of ranks that disagree."""
