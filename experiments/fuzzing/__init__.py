"""Modules of experiments/fuzz.py.

target.py      base classes of targets: a target makes seeds, mutates them into cases, and reads a case
targets/       one module for each group of vitpar's readers
attacks/       mutations of bytes, text and files of each format
oracle.py      judges how a reader handled a case
guard.py       limits a worker; detects programs that a case starts and files that it opens
worker.py      process that runs cases
process.py     starts, watches and ends a worker
hunt.py        distributes cases to workers and collects findings
report.py      prints progress, table and findings
"""
