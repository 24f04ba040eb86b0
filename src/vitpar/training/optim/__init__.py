"""Optimizers over sharded parameters, and what a step needs beside them: norms, clipping, rates, averages, scales."""
