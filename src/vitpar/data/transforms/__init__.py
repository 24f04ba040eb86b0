"""Transforms: from decoded pixels to the numbers that a model takes.

Images stay uint8, a quarter of the bytes to move; they are normalised, and mixed with each other, on the device.
"""
