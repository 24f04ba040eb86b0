"""What experiments/fuzz.py consists of: readers of files, URLs and text of others, and hostile input for them.

target.py      what a target is: it makes seeds, makes a case of them, and reads the case
targets/       the readers of vitpar, one after the other
attacks/       how bytes, text and files of each format are made hostile
oracle.py      what is wrong with how a reader took a case
guard.py       the limits of a worker, and what a case did that no reader may do
worker.py      the process that runs cases; whatever a case does to it, the parent sees it
process.py     a worker as the parent sees it
hunt.py        the parent: gives out cases, ends what hangs, keeps findings
report.py      progress, table and findings in words
"""
