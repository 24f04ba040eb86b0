"""Kernels written by hand in Triton, one file each. Modules here import Triton: import them where they run."""
