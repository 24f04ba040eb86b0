"""Prices of BERT and T5: bytes that layers keep for backward, compared with what autograd keeps, and a search."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from helpers.text_models import V1_1, TextModel, bert, t5
from vitpar import Execution
from vitpar.models.initial import initialise
from vitpar.models.layers import LayeredModel
from vitpar.parallel.vocabulary import token_losses
from vitpar.planner.measure.layer_bench import LayerBench, built
from vitpar.planner.profile.cluster import find_cluster
from vitpar.planner.profile.estimate import estimate_model

WIDE = {"embed_dim": 192, "mlp_hidden_dim": 768, "vocab_size": 3000, "tokens": 128, "depth": 1, "num_heads": 3}
CASES: dict[str, TextModel] = {
    "bert": bert(**WIDE),
    "t5": t5(**WIDE, head_dim=64, decoder_tokens=96),
    "t5 v1.1": t5(**WIDE, **V1_1, head_dim=96, decoder_tokens=96),
}


def kept(config: TextModel, batch: int) -> dict[str, int]:
    """Return the bytes that each layer and the loss after it keep for backward, by name."""
    model = LayeredModel(config)
    initialise(model, 0, config)
    own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    x = torch.randint(0, config.vocab_size, (batch, config.tokens))
    found = {}
    for name, layer in model.layers().items():
        storages: dict[int, int] = {}

        def keep(tensor: Tensor, storages: dict[int, int] = storages) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        ids = {"decoder_input_ids": torch.zeros(batch, 96, dtype=torch.int64)}
        sides = {key: side for key, side in ids.items() if key in layer.SIDE_INPUTS}
        own.add(x.untyped_storage().data_ptr())  # the layer before keeps it
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            x = layer(x, **sides)
            if layer.description.last:
                storages.pop(x.untyped_storage().data_ptr(), None)
                loss = token_losses(x, torch.zeros(x.shape[:2], dtype=torch.int64)).sum()
                assert loss.isfinite()
        if not layer.description.last:  # its output counts as its own
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        found[name] = sum(storages.values())
        x = x.detach().requires_grad_()
    return found


@pytest.mark.parametrize("case", CASES)
def test_bytes_kept_for_backward_are_those_of_autograd(case: str) -> None:
    config, batch = CASES[case], 8
    profile = estimate_model(config, "fp32", find_cluster("8xH100").hardware(), ("tp1",))
    rows = {one.layer: one.saved.per_row for one in profile.layers if one.checkpoint == "none" and not one.wrapped}
    found = kept(config, batch)
    for kind, layer in config.kinds.items():
        assert rows[kind] == pytest.approx(found[layer.name] / batch, rel=0.2), kind


@pytest.mark.parametrize("tensor", ["tp3", "tp3+sp"])
@pytest.mark.parametrize("case", CASES)
def test_bytes_kept_under_tensor_parallelism_are_those_of_one_rank(
    case: str, tensor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
