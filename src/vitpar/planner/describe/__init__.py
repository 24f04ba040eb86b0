"""What a plan makes of a model, in numbers and words, by arithmetic alone."""
