"""What goes wrong in a run: hangs, numbers that are not finite, ranks that differ; noticed, told and ended."""
