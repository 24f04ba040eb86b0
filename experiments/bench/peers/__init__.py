"""Contenders of ``bench_peers.py``: vitpar, and other libraries that train the same model.

Each runs in a separate process (``bench.peers.worker``) and sleeps while others have their turn. Each contender is a
module with a function `make`, which returns the model, its step, and the library's name and version.
"""

CONTENDERS = {"vitpar_step": "vitpar", "plain": "PyTorch by hand", "timm_loop": "timm, plain loop"}
"""Modules of this package and their names in tables. Ratios are relative to the first one that was measured."""
