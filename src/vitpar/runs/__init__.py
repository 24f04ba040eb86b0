"""Run folders, read back: states, metrics, and reports with charts."""
