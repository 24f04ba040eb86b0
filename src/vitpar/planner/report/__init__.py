"""What a search found, to be read by programs and people."""
