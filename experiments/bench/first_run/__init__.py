"""Parts of ``gpu_first_run.py``: its programs, their time limits, and its results. Imports no torch."""
