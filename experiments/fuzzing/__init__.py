"""The parts of experiments/fuzz.py.

target.py      what a target is: it makes seeds, makes a case of them, and reads the case
targets/       one module for each group of vitpar's readers
attacks/       how bytes, text and files of each format are made hostile
oracle.py      what is wrong with how a reader took a case
guard.py       limits of a worker; sees programs that a case starts and files that it opens
worker.py      the process that runs cases
process.py     starts, watches and ends a worker
hunt.py        gives cases to workers and keeps findings
report.py      progress, table and findings in words
"""
