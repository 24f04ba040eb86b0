"""What a run saves, when, and how another goes on from it."""
