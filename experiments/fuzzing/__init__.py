"""Modules of experiments/fuzz.py.

case.py          a case, and the base class of targets
readers/         targets: one module for each kind of vitpar's readers
edits.py         edits of bytes, JSON and TOML; dictionary.toml has hostile words
formats.py       edits that know where a format has numbers, parts and checksums; hostile.py has hostile parts
oracle.py        judges how a reader handled a case
guard.py         runs a case in a forked process with limits, and detects programs, connections and files outside
campaign.py      lets hypothesis draw, shrink and store cases
"""
