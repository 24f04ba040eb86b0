"""CUDA out-of-memory errors: which errors count as such, and the message that replaces them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.small_data import pack_small
from vitpar.errors import DeviceMemoryError, UserError
from vitpar.planner.measure import device as device_file
from vitpar.planner.out_of_memory import explain_memory, is_out_of_memory, memory_of, memory_warning
from vitpar.recipe import Recipe
from vitpar.recipe.sections.input import DataSection
from vitpar_cli.profiled import MachineOptions

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ERROR = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def recipe(mesh: str, **train: Any) -> Recipe:
    train = {"steps": 1, "batch_size": 256, "precision": "bf16", **train}
    sections = {"model": {"name": "vit_base_patch16_224"}, "data": {"path": "x"}, "parallel": {"mesh": mesh}}
    return Recipe.model_validate({**sections, "train": train})


def told(mesh: str, error: Exception = ERROR, device: torch.device = CPU, **train: Any) -> str:
    asked = recipe(mesh, **train)
    config = asked.config(1000)
    with pytest.raises(DeviceMemoryError) as raised, explain_memory(asked, config, asked.plan(config), device):
        raise error
    assert raised.value.__cause__ is error and isinstance(raised.value, UserError)
    return str(raised.value)


def test_other_errors_pass_unchanged() -> None:
    asked = recipe("dp1")
    config = asked.config(1000)
    for error in (RuntimeError("shapes differ"), KeyError("x"), RuntimeError("DataLoader out of memory")):
        with pytest.raises(type(error)), explain_memory(asked, config, asked.plan(config), CPU):
            raise error


def test_wrapped_out_of_memory_errors_are_recognised() -> None:
    try:
        try:
            raise ERROR
        except RuntimeError as error:
            raise RuntimeError("stage 0 failed to run forward") from error
    except RuntimeError as error:
        assert is_out_of_memory(error) and told("dp1", error)
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))


def test_message_compares_needed_with_available_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1e9, 24e9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 18e9)
    words = told("dp2", device=CUDA)
    asked = recipe("dp2")
    config = asked.config(1000)
    (memory,) = memory_of(asked, config, asked.plan(config), "cuda")
    assert f"CUDA is out of memory on rank 0: a step is predicted to need {memory.total / 1e9:.3g} GB (act" in words
    assert "the GPU has 24 GB, of which other programs and the CUDA runtime take 5 GB" in words
    assert words.endswith("use --microbatches 2, +ckpt, fsdp in place of dp or +zero1")
    assert words.count("\n") == 0

    def broken(device: torch.device) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", broken)
    assert "the GPU has" not in told("dp2", device=CUDA)


WAYS: list[tuple[str, dict[str, Any], str]] = [
    ("dp2", {"precision": "fp32"}, "--microbatches 2, +ckpt, --precision bf16, fsdp in place of dp or +zero1"),
    ("dp2+ckpt+zero1", {}, "--microbatches 2 or fsdp in place of dp"),
    ("fsdp2", {"batch_size": 2}, "more GPUs with fsdp, +offload or +ckpt"),
    ("fsdp2+ckpt+offload", {"batch_size": 2}, "a smaller model"),
    ("pp2", {"batch_size": 64}, "--microbatches 8, +ckpt, more GPUs with fsdp or +offload"),
]


def test_message_suggests_the_most_effective_change_first() -> None:
    for mesh, train, ways in WAYS:
        assert told(mesh, **train).endswith(f": use {ways}"), mesh


def test_images_that_a_gpu_holds_are_counted(tmp_path: Path) -> None:
    """In the need of a step, of a plan on a cluster, and among what reduces it. CPU ranks share one copy."""
    data = pack_small(tmp_path)
    held = recipe("dp2").model_copy(update={"data": DataSection(path=str(data), cache="device")})
    config = held.config(7)
    bytes_held = 3 * (35 * 10**2 + 18 * 224**2)

    def need(asked: Recipe, device_type: str) -> float:
        return memory_of(asked, config, asked.plan(config), device_type)[0].total

    plain = recipe("dp2")
    assert need(held, "cuda") - need(plain, "cuda") == bytes_held and need(held, "cpu") == need(plain, "cpu")
    costs = [MachineOptions(cluster="8xH100", num_classes=7).costs(asked) for asked in (held, plain)]
    assert costs[0].hardware.reserved_bytes - costs[1].hardware.reserved_bytes == bytes_held
    refused = pytest.raises(DeviceMemoryError, match=r"or data\.cache memory$")
    with refused, explain_memory(held, config, held.plan(config), CPU):
        raise ERROR


def test_predicted_lack_of_memory_gives_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = recipe("dp2")
    config = asked.config(1000)
    plan = asked.plan(config)
    (memory,) = memory_of(asked, config, plan, "cuda")
    for device, ranks, there in ((CPU, 2, 2 * memory.total), (CUDA, 2, memory.total)):
        monkeypatch.setattr(device_file, "memory_bytes", lambda _, there=there: 1.01 * there)
        assert memory_warning(asked, config, plan, device, ranks) is None
        monkeypatch.setattr(device_file, "memory_bytes", lambda _, there=there: 0.99 * there)
        warning = memory_warning(asked, config, plan, device, ranks)
        assert warning and "--microbatches 2" in warning
