"""Programmes for short use of a GPU: what is run, how long at most, and what is predicted. Imports no torch."""
