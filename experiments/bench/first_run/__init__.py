"""The first run on a GPU, part by part: what runs, how it is stopped in time, what is kept. Imports no torch."""
