"""Train with your own loop: vitpar parallelizes the model, the rest is plain PyTorch.

    torchrun --nproc-per-node 4 examples/own_loop.py tp2xdp2
    torchrun --nproc-per-node 4 examples/own_loop.py pp2xfsdp2     # the same losses

The images are random, so the loss falls only because the model memorises them.
"""

import os
import sys

import torch
import torch.distributed as dist

import vitpar

BATCH, STEPS = 32, 20


def main() -> None:
    """Train for 20 steps under the plan on the command line (default: dp) and print every fifth loss."""
    dist.init_process_group("gloo")
    config = vitpar.model_config("vit_tiny_patch8_32", depth=4, num_heads=4, num_classes=10)
    plan = vitpar.validate(vitpar.parse(sys.argv[1] if len(sys.argv) > 1 else "dp"), config, batch_size=BATCH)
    model = vitpar.parallelize(config, plan, vitpar.Execution(BATCH), "cpu")
    # foreach=False: one foreach call cannot mix sharded and replicated parameters.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    generator = torch.Generator().manual_seed(0)  # the same global batch on every rank
    images = torch.randn(BATCH, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (BATCH,), generator=generator)
    # A rank passes its own images but all labels. Ranks without the first pipeline stage take no images.
    mine = images[model.image_rows(BATCH)] if model.takes_images else None
    for step in range(1, STEPS + 1):
        part = model.forward_backward(mine, labels)
        optimizer.step()
        optimizer.zero_grad()
        # Required after updates by an optimizer that is not vitpar's: drops gathered copies of the old parameters.
        model.parameters_changed()
        loss = model.global_loss(part)  # collective
        if dist.get_rank() == 0 and step % 5 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()
    # Without this, Python's shutdown aborts about one run in ten on a busy machine (torch 2.13: threads of gloo may
    # still have to release tensors of the last collective, and DTensor keeps their groups alive).
    os._exit(0)


if __name__ == "__main__":
    main()
