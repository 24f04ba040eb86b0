"""Results of a search, for programs and people."""
