"""Contenders of ``bench_peers.py``: vitpar, and other libraries that train the same model.

Each runs in a separate process (``bench.peers.worker``) and sleeps while others have their turn.
"""

CONTENDERS = {"vitpar_step": "vitpar", "plain": "PyTorch by hand", "timm_loop": "timm, plain loop"}
"""Contenders and their names in tables. Ratios are relative to the first one that was measured."""
NEEDS = {"timm_loop": "timm"}
"""Packages without which a contender is left out."""
