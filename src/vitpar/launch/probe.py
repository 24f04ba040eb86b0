"""What a rank of the smallest world runs to show that worlds work here: join, one all-reduce, leave."""

from vitpar.launch import find_world, join, leave, reporting

TIMEOUT = 30.0  # seconds for the ranks to meet, and for the all-reduce


def main() -> None:
    """Joins the world found and adds up one number a rank; raises RuntimeError when the sum is wrong."""
    world = find_world()
    assert world is not None, "start it through run_world"
    join(world, "cpu", timeout=TIMEOUT)

    import torch
    import torch.distributed as dist

    total = torch.tensor([world.rank + 1])
    dist.all_reduce(total)
    expected = world.size * (world.size + 1) // 2
    if total.item() != expected:
        raise RuntimeError(f"{world.size} ranks added up to {total.item()} instead of {expected}")
    leave()


if __name__ == "__main__":
    with reporting():
        main()
