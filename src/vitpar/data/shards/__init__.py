"""Data sets as they lie on disks: WebDataset tar shards, and an index beside them."""
