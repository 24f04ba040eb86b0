"""Import of Galvatron's profiles, and its four published memory budgets for ViT-Huge-32."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.galvatron_2022 import BATCHES, COLUMNS, TABLE, imported, vit_cost_model, vit_huge_32, write_profiles
from helpers.galvatron_cost import MB, UnderItsModel
from vitpar import __version__
from vitpar.errors import PlannerError
from vitpar.models import model_config
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import price
from vitpar.planner.profile.galvatron import import_hardware, import_model
from vitpar.planner.search.best import Search
from vitpar.planner.search.space import Space
from vitpar.strategy import parse, validate
from vitpar_cli.main import app

OPTIMUM = {8: 37.731, 12: 53.311, 16: 67.542, 20: 75.435}
"""Images per second by GB of memory: the optimum under Galvatron's cost model, found by exhaustive search over mixes of
up to three strategies. The memory of every layer is rounded up to full MB."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("galvatron")
    write_profiles(made)
    return made


@pytest.fixture(scope="module")
def costs(folder: Path) -> LayerCosts:
    return imported(folder)


@pytest.mark.parametrize("gigabytes", TABLE)
def test_galvatrons_cost_model_gives_its_published_table(gigabytes: int) -> None:
    """The expected values are those that Galvatron printed."""
    speed, batch_size, words = TABLE[gigabytes]
    its_model = vit_cost_model()
    found = its_model.price(parse(words), batch_size)
    assert found.images_per_second == pytest.approx(speed, rel=0.006)
    assert found.memory_bytes <= gigabytes * 1024 * MB
    for plan, speeds in COLUMNS.items():
        prices = [its_model.price(parse(plan), n) for n in BATCHES]
        fitting = [p.images_per_second for p in prices if p.memory_bytes <= gigabytes * 1024 * MB]
        assert max(fitting, default=0.0) == pytest.approx(speeds[list(TABLE).index(gigabytes)], rel=0.004)


@pytest.mark.parametrize("gigabytes", TABLE)
def test_search_finds_the_optimum_of_galvatrons_cost_model(costs: LayerCosts, gigabytes: int) -> None:
    found = UnderItsModel(costs, vit_cost_model(), tuple(BATCHES)).best(gigabytes * 1024 * MB).plans[0]
    assert found.images_per_second == pytest.approx(OPTIMUM[gigabytes], abs=0.005)
    assert found.memory_bytes <= gigabytes * 1024 * MB and found.memory_bytes % MB == 0
    validate(found.plan, costs.config, found.batch_size)


def test_imported_links_have_galvatrons_times(folder: Path) -> None:
    hardware = import_hardware(folder, 1, 8, 10**9)
    link = next(li for li in hardware.links if (li.operation, li.ranks, li.stride) == ("all_reduce", 4, 2))
    assert link.seconds(100 * MB) == pytest.approx(2 * 3 / 4 * 100 * 0.22014 / 1e3)
    assert hardware.overlap is not None and hardware.overlap.communication == 1.3


def test_times_by_message_size_take_precedence(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    times = {"allreduce_size_8_1MB_time": 0.5, "allreduce_size_8_2MB_time": 0.6, "all2all_size_8_1MB_time": 0.3}
    (tmp_path / "sp_time_1nodes_8gpus_per_node.json").write_text(json.dumps(times))
    links = {(li.operation, li.ranks, li.stride): li for li in import_hardware(tmp_path, 1, 8, 10**9).links}
    assert links["all_reduce", 8, 1].seconds(2 * MB) == pytest.approx(0.6e-3)
    assert links["reduce_scatter", 8, 1].seconds(2 * MB) == pytest.approx(0.3e-3)
    assert links["all_to_all", 8, 1].seconds(MB) == pytest.approx(0.3e-3)


def with_times(folder: Path, target: Path, times: dict[str, float]) -> LayerCosts:
    """Return prices from the files in `folder`, with other times per image of a block by batch size."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    found = {f"layertype_0_bsz{images}_seq196": each for images, each in times.items()}
    found["layertype_other_bsz8_seq196"] = 0.0
    (target / "computation_profiling_fp32_all.json").write_text(json.dumps(found))
    return imported(target)


def test_every_profiled_batch_size_is_used(folder: Path, tmp_path: Path) -> None:
    """A forward takes 12 ms plus 0.5 ms per image.

    Batch size 1 is the first key; the importer once read only that one.
    """
    times = {str(images): 12 / images + 0.5 for images in (1, 64, 8)}
    costs = with_times(folder, tmp_path, times)
    plan = validate(parse("dp8"), costs.config, 512)
    layers = {(p.layer, p.tensor): p for p in costs.model.layers if p.checkpoint == "none" and p.wrapped}
    block, split = layers["block", "tp1"], layers["block", "tp4"]
    assert [block.forward.seconds(n) for n in (1, 8, 64)] == pytest.approx([12.5e-3, 16e-3, 44e-3])
    assert block.forward.seconds(128) == pytest.approx(76e-3)
    assert split.forward.seconds(8) == pytest.approx(13e-3), "what a batch takes without images is not split"
    assert price(plan, costs, 512).images_per_second > 3 * price(plan, costs, 8).images_per_second


def test_microbatches_below_the_profiled_batch_are_not_free(folder: Path, tmp_path: Path) -> None:
    costs = with_times(folder, tmp_path, {"8": 0.75})
    block = next(layer for layer in costs.model.layers if (layer.layer, layer.tensor) == ("block", "tp1"))
    assert block.forward.seconds(1) == block.forward.seconds(8) == pytest.approx(6e-3)
    assert block.forward.seconds(16) == pytest.approx(12e-3)
    few, many = (replace(validate(parse("pp8"), costs.config, 64), microbatches=n) for n in (8, 64))
    assert price(few, costs, 64).seconds < price(many, costs, 64).seconds


def test_invalid_galvatron_profiles_are_refused(folder: Path, tmp_path: Path) -> None:
    invalid: tuple[tuple[str, object, str], ...] = (
        ("memory_profiling_fp32_all.json", {}, "no layertype_0 of 196 tokens"),
        ("computation_profiling_other.json", {}, "2 files"),
        ("p2p_bandwidth_1nodes_8gpus_per_node.json", {"pp_size_2": 0}, "pp_size_2: Input should be greater"),
    )
    for number, (name, found, words) in enumerate(invalid):
        copied = shutil.copytree(folder, tmp_path / str(number))
        (copied / name).write_text(json.dumps(found))
        with pytest.raises(PlannerError, match=words):
            import_hardware(copied, 1, 8, 10**9)
            import_model(copied, vit_huge_32(), "fp32")


def test_profiles_from_the_command_are_readable_by_search(folder: Path, tmp_path: Path) -> None:
    model = ("--model", "vit_huge_patch14_224", "--set", "model.patch_size=16", "--set", "model.pool=avg")
    files = [str(tmp_path / name) for name in ("hardware.json", "model.json")]
    invoke = CliRunner().invoke
    outs = ("--hardware-out", files[0], "--model-out", files[1])
    said = invoke(app, ["galvatron", "profiles", str(folder), str(folder), "--memory", "24GB", *model, *outs])
    assert said.exit_code == 0 and "tp1, tp2, tp4, tp8" in said.stdout and "counted as zero: optimizer" in said.stdout
    assert "in fp32" in said.stdout and "blocks profiled with batches of 8" in said.stdout
    assert f"vitpar {__version__}: vitpar" in said.stdout
    reads = ("--hardware", files[0], "--model-profile", files[1])
    found = invoke(app, ["search", *model, *reads, "--batch-size", "64", "--memory", "20GB", "--roles", "dp,fsdp"])
    assert found.exit_code == 0 and "imported from Galvatron" in found.stdout
    assert "not searched, because the profiles lack it: ckpt, ckpt.selective, offload" in found.stderr


def write_profile(folder: Path, target: Path, tokens: tuple[int, ...], other: str = "other") -> None:
    """Write a profile: layer type n has tokens[n], takes n + 1 ms per sample, and keeps 10 · (n + 1) MB of it.

    other: name of everything else in the file.
    """
    shutil.copytree(folder, target, dirs_exist_ok=True)
    every = f"[{','.join(map(str, tokens))}]" if len(tokens) > 1 else str(tokens[0])
    times = {f"layertype_{n}_bsz4_seq{seq}": n + 1.0 for n, seq in enumerate(tokens)}
    raw = {f"layernum[1,1,1]_bsz4_seq{every}": 20.0, f"layertype_{other}_bsz4_seq{every}": 2.0}
    memory = {
        f"layertype_{n}": {
            str(seq): {
                "tp_activation_per_bsz_dict": {"1": 10.0 * (n + 1), "2": 6.0 * (n + 1), "8": 2.0, "checkpoint": 1.0}
            }
        }
        for n, seq in enumerate(tokens)
    }
    ends = {f"other_memory_pp_on_{place}": {every: {"activation": {"1": 5.0}}} for place in ("first", "last")}
    (target / "computation_profiling_fp32_all.json").write_text(json.dumps({**times, **raw}))
    (target / "memory_profiling_fp32_all.json").write_text(json.dumps({**memory, **ends}))


def test_layer_types_of_a_swin_become_its_kinds_of_blocks(folder: Path, tmp_path: Path) -> None:
    """Blocks that merge patches take longer by their additional FLOPs. tp2 does not split the 3 heads of stage 1."""
    write_profile(folder, tmp_path, (256, 64, 16))
    config = model_config("swin_nano_patch2_window4_32", embed_dim=48, num_heads=(3, 6, 12))
    model = import_model(tmp_path, config, "fp32")
    found = {(layer.layer, layer.tensor): layer for layer in model.layers if layer.checkpoint == "none"}
    for number in range(3):
        block = found[f"stage{number + 1}", "tp1"]
        assert block.forward.seconds(8) == pytest.approx(8 * (number + 1) / 1e3)
        assert block.saved.of(1) == 10 * (number + 1) * MB
    merge, stage = config.kinds["merge2"], config.kinds["stage2"]
    assert found["merge2", "tp1"].forward.seconds(8) == pytest.approx(16e-3 * merge.flops / stage.flops)
    assert merge.flops > stage.flops
    assert ("stage1", "tp2") not in found and found["stage2", "tp2"].forward.seconds(8) == pytest.approx(8e-3)
    assert found["embed", "tp1"].forward.seconds(4) == pytest.approx(4e-3)
    assert {layer.layer for layer in model.layers if layer.checkpoint == "full"} == {*config.kinds}
    hardware = import_hardware(folder, 1, 8, 10**9)
    space = Space(config, 8, (64,), flags=("ckpt",), tensors=model.tensors, schedules=("1f1b",))
    best = Search(space, LayerCosts(config, hardware, model)).best(float("inf")).plans[0]
    assert validate(best.plan, config, 64) == best.plan


def test_layer_types_of_a_t5_become_its_encoder_and_decoder(folder: Path, tmp_path: Path) -> None:
    """The decoder has its own tokens in the file. What is measured together is shared by the three other layers."""
    write_profile(folder, tmp_path, (24, 8))
    config = model_config("t5_small", tokens=24, decoder_tokens=8)
    model = import_model(tmp_path, config, "fp32")
    found = {(layer.layer, layer.tensor): layer for layer in model.layers if layer.checkpoint == "none"}
    expected = {"encoder": (1.0, 10), "decoder": (2.0, 20), **dict.fromkeys(("embed", "dec_embed", "head"), (2 / 3, 5))}
    assert {kind for kind, _ in found} == {*config.kinds} == {*expected}
    for kind, (milliseconds, megabytes) in expected.items():
        assert found[kind, "tp1"].forward.seconds(4) == pytest.approx(4 * milliseconds / 1e3)
        assert found[kind, "tp2"].forward.seconds(4) == pytest.approx(2 * milliseconds / 1e3)
        assert found[kind, "tp1"].saved.of(1) == megabytes * MB
    with pytest.raises(PlannerError, match="no layertype_1 of 16 tokens"):
        import_model(tmp_path, model_config("t5_small", tokens=24, decoder_tokens=16), "fp32")


def test_profile_of_a_bert_is_read(folder: Path, tmp_path: Path) -> None:
    """The BERT profiles that Galvatron ships have "other_0", and tp8, which does not divide the 12 heads."""
    write_profile(folder, tmp_path, (128,), "other_0")
    model = import_model(tmp_path, model_config("bert_base", tokens=128), "fp32")
    found = {(layer.layer, layer.tensor): layer for layer in model.layers if layer.checkpoint == "none"}
    assert [found[kind, "tp1"].forward.seconds(4) for kind in ("block", "embed", "head")] == [4e-3, 4e-3, 4e-3]
    assert found["block", "tp2"].saved.of(1) == 6 * MB and model.tensors == ("tp1", "tp2")
    with pytest.raises(PlannerError, match="no layertype_0 of 512 tokens"):
        import_model(tmp_path, model_config("bert_base"), "fp32")
