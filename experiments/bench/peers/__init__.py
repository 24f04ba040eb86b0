"""Contenders of ``bench_peers.py``: vitpar and other libraries that train the same model.

Each runs its own training loop in a separate process (``bench.peers.worker``) and sleeps while others have their turn.
Each contender is a module with a function `train`, which never returns.
"""

CONTENDERS = {
    "vitpar_trainer": "vitpar, whole loop",
    "vitpar_step": "vitpar, bare step",
    "plain": "PyTorch by hand",
    "timm_loop": "timm, plain loop",
    "transformers_trainer": "transformers Trainer",
    "lightning_trainer": "Lightning Trainer",
}
"""Modules of this package and their names in tables."""
ONLY_VIT = ("transformers_trainer",)
"""Contenders that train ViTs only."""
OURS = ("vitpar_trainer", "vitpar_step")
"""Contenders of vitpar. Ratios are relative to the first of them that was measured."""
