"""Modules of experiments/fuzz.py.

case.py          a case, and the base class of targets
readers/         targets: one module for each kind of vitpar's readers
edits.py         strategies that edit files; hostile.py, dictionary.toml and pieces.toml have hostile words and parts
oracle.py        judges how a reader handled a case
guard.py         runs a case in a forked process with limits, and detects programs, connections and files outside
campaign.py      lets hypothesis draw, shrink and store cases
"""
