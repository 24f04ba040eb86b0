"""Transforms from decoded pixels to the input of a model.

Images stay uint8 until they are on the device, which is a quarter of the bytes of float32 to copy. They are normalised
and mixed with each other there.
"""
