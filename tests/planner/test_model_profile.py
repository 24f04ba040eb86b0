"""Profiles of a model's layers, measured on one device for the shards of every strategy, and estimates beside them."""

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import vitpar.planner.measure.clock as timing
import vitpar.planner.measure.model as profiling
from helpers.dino_models import dino
from helpers.mae_models import mae
from helpers.text_models import V1_1, TextModel, bert, t5
from vitpar import Execution
from vitpar.errors import PlannerError
from vitpar.models import ModelConfig, ViTConfig, model_config
from vitpar.models.layers import LayerNorm
from vitpar.parallel.attention import use_attention
from vitpar.planner.cost.elements import layer_parameters
from vitpar.planner.measure.clock import Clock, Neighbours
from vitpar.planner.measure.device import LiveBytes
from vitpar.planner.measure.layer_bench import LayerBench, built
from vitpar.planner.measure.model import profile_model, strategies
from vitpar.planner.profile.cluster import find_cluster
from vitpar.planner.profile.estimate import estimate_model, tensors
from vitpar.planner.profile.profiles import CHECKPOINTS, Bytes, LayerProfile, ModelProfile
from vitpar.strategy import parse, validate

CPU = torch.device("cpu")


def tiny(**options: Any) -> ViTConfig:
    sizes = {
        **{"patch_size": 4, "image_size": 8, "channels": 1, "embed_dim": 32, "depth": 2, "num_heads": 4},
        "num_classes": 5,
    }
    return model_config("vit_custom", **{**sizes, **options})


def hurry(patch: pytest.MonkeyPatch, rows: int) -> None:
    """Take two readings each of all numbers up to `rows`."""
    for name, value in (("SHORTEST", 0.0), ("FEWEST", 2), ("MOST", 2)):
        patch.setattr(timing, name, value)
    patch.setattr(profiling, "MOST_ROWS", rows)
    patch.setattr(profiling, "LONGEST", {"cpu": 1e6})  # do not skip slow measurements on a busy machine


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    with pytest.MonkeyPatch.context() as patch:
        hurry(patch, rows=4)  # durations do not matter here
        clock = Clock(CPU, Neighbours(0, 1, None), 0.001)
        said: list[tuple[int, int, str]] = []
        found = profile_model(tiny(), Execution(1), 4, clock, progress=lambda *point: said.append(point))
        assert [done for done, _, _ in said] == list(range(said[0][1]))
    return found


def of(profile: ModelProfile, layer: str, tensor: str, checkpoint: str = "none", wrapped: bool = False) -> LayerProfile:
    wanted = (layer, tensor, checkpoint, wrapped)
    (found,) = [p for p in profile.layers if (p.layer, p.tensor, p.checkpoint, p.wrapped) == wanted]
    return found


def test_profile_covers_the_strategies_that_fit_the_model(profile: ModelProfile) -> None:
    fitting = ["tp1", "tp2", "tp2+sp", "tp4", "tp4+sp", "tp4+2d"]
    assert list(dict.fromkeys(p.tensor for p in profile.layers)) == fitting
    assert {p.wrapped for p in profile.layers if p.tensor == "tp4+2d"} == {True}
    assert len(profile.layers) == 3 * 3 * (5 * 2 + 1)
    assert [(w.layer, w.tensor) for w in profile.weights] == [
        (kind, tensor) for tensor in fitting for kind in ("embed", "block", "head")
    ]
    assert "tp3" in tensors(tiny(num_heads=6, embed_dim=36), 6)
    assert tensors(tiny(num_heads=3, embed_dim=24), 4) == ("tp1",)
    wide = tensors(tiny(num_heads=8), 8)
    assert "tp8+3d" in wide and "tp8+2d" not in wide
    both = {(tensor, wrapped) for tensor, _, wrapped in strategies(tiny(), 4, False)}
    assert {("tp2", False), ("tp2", True), ("tp4+2d", True)} <= both and ("tp4+2d", False) not in both
    assert {checkpoint for _, checkpoint, _ in strategies(tiny(), 2, True)} == {"none", "full"}


def test_saved_memory_follows_the_checkpoint_policy(profile: ModelProfile) -> None:
    config = tiny()
    token_bytes = 4 * config.tokens * config.embed_dim
    kept, selected, dropped = (of(profile, "block", "tp1", name).saved for name in ("none", "selective", "full"))
    assert dropped == Bytes(fixed=0, per_row=token_bytes)  # only the output, which the next layer saves as its input
    assert dropped.per_row < selected.per_row < kept.per_row
    # Inputs and outputs of two norms, q, k and v, the attention output, two MLP activations, two residual sums.
    assert kept.per_row > 12 * token_bytes
    halves = of(profile, "block", "tp2").saved
    assert token_bytes * 2 < halves.per_row < kept.per_row
    wide = of(profile, "block", "tp1", "full").workspace
    assert wide.per_row > kept.per_row / 2  # recomputed in backward


def test_weight_profiles_have_the_elements_of_a_rank(profile: ModelProfile) -> None:
    config = tiny(depth=1)
    for mesh in ("dp1", "tp2", "tp4+sp"):
        held = layer_parameters(config, validate(parse(mesh), config, None))
        mine = {w.layer: w.elements for w in profile.weights if w.tensor == mesh.replace("dp", "tp")}
        assert mine == {"embed": held["embed"], "block": held["blocks.0"], "head": held["head"]}
    whole = {w.layer: w.elements for w in profile.weights if w.tensor == "tp4+2d"}
    half = layer_parameters(config, validate(parse("tp4+2d"), config, None))
    # The profile counts weights after the gather over axis i.
    assert whole["block"] == pytest.approx(2 * half["blocks.0"], rel=0.01)


def test_profile_round_trips_through_its_file(profile: ModelProfile, tmp_path: Path) -> None:
    assert ViTConfig(**profile.model) == tiny() and profile.model == asdict(tiny())
    assert profile.optimizer.timings[0].size == sum(p.elements for p in profile.weights if p.tensor == "tp1")
    assert 0 < of(profile, "block", "tp1").input_share <= 1 and of(profile, "embed", "tp1").input_share == 0
    profile.save(tmp_path / "model.json")
    assert ModelProfile.read(tmp_path / "model.json") == profile
    (tmp_path / "other.json").write_text('{"format": "vitpar hardware 2"}')
    with pytest.raises(PlannerError, match=r"other.json is not a model profile, format: .* `vitpar profile model`"):
        ModelProfile.read(tmp_path / "other.json")


def test_live_bytes_follow_allocations_and_frees() -> None:
    x = torch.ones(256)
    with LiveBytes() as live:
        y = x + 1
        assert live.now == live.most == 1024
        view = y[:10]
        del y
        assert live.now == 1024  # the view keeps the complete storage alive
        z = F.gelu(view.repeat(100))
        assert live.now == 1024 + z.nbytes and live.most == 1024 + 2 * z.nbytes
        del z
        view += 1
        assert live.now == 1024


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_estimated_memory_matches_the_measured_bytes(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tolerance covers a few numbers per token that norms and attention save in addition.

    Estimates are for GPUs, so norms are torch's: on CPUs ours save more in 16 bits.
    """
    monkeypatch.setattr(LayerNorm, "forward", torch.nn.LayerNorm.forward)
    config = tiny(embed_dim=64, num_heads=8, mlp_hidden_dim=320, depth=1, image_size=32, channels=3)
    hardware = find_cluster("1x8xH100").hardware()
    cases = [("tp1", "none"), ("tp1", "selective"), ("tp1", "full"), ("tp4", "none"), ("tp4+sp", "full")]
    cases += [("tp4+2d", "selective"), ("tp4+2d", "none"), ("tp8+3d", "none")]
    estimate = estimate_model(config, precision, hardware, tuple(dict.fromkeys(tensor for tensor, _ in cases)))
    for tensor, policy in cases:
        first_rank = built(config, Execution(1, precision), tensor + CHECKPOINTS[policy], CPU)
        with first_rank as model, model.low_precision_params.in_place():
            for kind in ("embed", "block", "head"):
                bench = LayerBench(model, kind)
                counted = [bench.memory(n * bench.unit)[0] for n in (2, 4)]
                per_row = (counted[1] - counted[0]) / 2 / bench.unit
                guessed = of(estimate, kind, tensor, policy, wrapped=True).saved.per_row
                few = 16 * config.tokens * 4
                assert abs(guessed - per_row) <= max(0.06 * per_row, few), (tensor, policy, kind)


@pytest.mark.parametrize(("config", "mesh"), [(mae(), "dp1"), (bert(), "fsdp2xtp2"), (t5(), "tp2+sp"), (dino(), "dp1")])
def test_layers_of_models_without_classes_are_measured(config: ModelConfig, mesh: str) -> None:
    """The head runs with the loss of tokens or patches, of which a rank may have a part."""
    with built(config, Execution(1), mesh, CPU) as model:
        for kind in config.kinds:
            bench = LayerBench(model, kind)
            saved, more = bench.memory(2 * bench.unit)
            assert saved > 0 and more > 0


def test_time_beside_the_layers_of_a_model_of_tokens_is_measured() -> None:
    clock = Clock(CPU, Neighbours(0, 1, None), 0.001)
    assert all(profiling._microbatch(config, Execution(1), clock) >= 0 for config in (mae(), t5()))


def test_every_number_of_rows_is_measured_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond its limit of graphs the compiler would run a block eagerly, without a word in the profile."""
    hurry(monkeypatch, rows=256)
    graphs: list[int] = []

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(len(inputs))
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counting))
    monkeypatch.setattr(sys.modules["vitpar.parallel.parallelize"], "GRAPHS", 2)
    with torch._dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=2, fail_on_recompile_limit_hit=True):
        clock = Clock(CPU, Neighbours(0, 1, None), 0.001)
        profile_model(tiny(), Execution(1, compile=True), 1, clock)
    assert len(graphs) == 5  # 1, 4, 16, 64, 256 rows


def test_profile_uses_the_attention_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch, rows=1)
    clock = Clock(CPU, Neighbours(0, 1, None), 0.001)
    flash: list[bool] = []
    try:
        for name, told in (("math", "math"), ("auto", "torch's choice")):
            note = lambda *_: flash.append(torch.backends.cuda.flash_sdp_enabled())  # noqa: E731
            found = profile_model(tiny(), Execution(1), 1, clock, attention=name, progress=note)
            assert found.measured["attention"] == told
            assert flash and set(flash) == {name == "auto"}
            flash.clear()
    finally:
        use_attention(None)


WIDE = {"embed_dim": 192, "mlp_hidden_dim": 768, "vocab_size": 3000, "tokens": 128, "depth": 1, "num_heads": 3}
CASES: dict[str, TextModel] = {
    "bert": bert(**WIDE),
    "t5": t5(**WIDE, head_dim=64, decoder_tokens=96),
    "t5 v1.1": t5(**WIDE, **V1_1, head_dim=96, decoder_tokens=96),
}


@pytest.mark.parametrize("tensor", ["tp1", "tp3", "tp3+sp"])
@pytest.mark.parametrize("case", CASES)
def test_bytes_kept_for_backward_are_those_of_a_step(case: str, tensor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates are for GPUs, where RMSNorm keeps its input: on CPUs torch keeps the normalised input too."""

    def from_input(norm: nn.RMSNorm, x: Tensor) -> Tensor:
        result = checkpoint(F.rms_norm, x, norm.normalized_shape, norm.weight, norm.eps, use_reentrant=False)
        assert isinstance(result, Tensor)
        return result

    monkeypatch.setattr(nn.RMSNorm, "forward", from_input)
    config = CASES[case]
    profile = estimate_model(config, "fp32", find_cluster("8xH100").hardware(), (tensor,))
    with built(config, Execution(1), tensor, torch.device("cpu")) as model:
        # The decoder's embedding is overestimated: no product keeps what its norm gives.
        for kind in config.kinds.keys() - {"dec_embed"}:
            bench = LayerBench(model, kind)
            once, twice = (bench.memory(rows * bench.unit)[0] for rows in (2, 4))
            (saved,) = {p.saved.per_row for p in profile.layers if (p.layer, p.checkpoint) == (kind, "none")}
            assert saved == pytest.approx((twice - once) / 2 / bench.unit, rel=0.2), kind
