"""Others that train the same ViT, and vitpar beside them: each in a process of its own (``bench.peers.worker``), where
its own loop runs and sleeps while the others have their turn. One contender a module, whose `train` never returns."""

CONTENDERS = {
    "vitpar_trainer": "vitpar, whole loop",
    "vitpar_step": "vitpar, bare step",
    "plain": "PyTorch by hand",
    "timm_loop": "timm, plain loop",
    "transformers_trainer": "transformers Trainer",
    "lightning_trainer": "Lightning Trainer",
}
"""Modules of this package, and what tables call them."""
OURS = ("vitpar_trainer", "vitpar_step")
