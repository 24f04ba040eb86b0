"""Data sets on disk: WebDataset tar shards with an index in the same folder."""
