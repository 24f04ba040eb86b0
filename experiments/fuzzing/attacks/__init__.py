"""Mutations of bytes, text and files of each format. All randomness comes from the generator passed to them."""
