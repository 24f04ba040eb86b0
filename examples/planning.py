"""Search for the best plan on devices that you do not have.

python examples/planning.py
"""

import vitpar


def main() -> None:
    """Print the best plan for ViT-H/14 on 8 H100 GPUs under two memory budgets per GPU."""
    for memory in ("80GB", "20GB"):
        result = vitpar.search("vit_huge_patch14_224", cluster="8xH100", batch_size=1024, memory=memory, seconds=5)
        best = result.plans[0]
        print(
            f"{memory}: {best.plan}, {best.images_per_second:,.0f} samples/s, "
            f"{best.memory_bytes / 1e9:.1f} GB, at most {result.gap:.1%} from the best"
        )


if __name__ == "__main__":
    main()
