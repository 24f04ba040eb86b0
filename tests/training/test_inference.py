"""Features of images, compared with timm's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.foreign_models import timm_model, timm_swin
from helpers.foreign_weights import CLASSES, SIZE, TIMM_CONFIG, saved, timm_state
from helpers.ranks import Ranks
from helpers.tiny_images import encoded
from vitpar import Execution, create_model, load_weights, model_config, parallelize, parse, validate
from vitpar.data.image_files import ImageFiles, NotedImages
from vitpar.data.images import decode
from vitpar.data.transforms.batch import Normalize
from vitpar.data.transforms.sample import EvalTransform
from vitpar.recipe import read_recipe
from vitpar.tasks import task_of
from vitpar.tasks.image_input import ImageInput
from vitpar.training.inference import feature_width, outputs
from vitpar.weights.folder import RECIPE, open_weights
from vitpar.weights.importing import import_weights

COUNT, BATCH = 7, 3


def computed(device: torch.device, weights: Path, paths: list[str], precision: str = "fp32") -> tuple[Tensor, Tensor]:
    """Return (logits, features) of all images; runs on one rank."""
    config = open_weights(weights).config
    plan = validate(parse("dp1"), config, BATCH)
    model = parallelize(config, plan, Execution(BATCH, precision), device)
    load_weights(model, weights)
    recipe = read_recipe(weights / RECIPE, {"data.path": "unused", "data.workers": 0, "train.batch_size": BATCH})
    images = NotedImages(ImageFiles(paths))
    source = ImageInput(recipe, model, task_of(recipe, model.config.num_classes))
    found = list(outputs(model, source, images, features=True))
    assert [sample for one in found for sample in one.samples] == list(range(COUNT)) and not images.problems
    assert feature_width(config) == found[0].features.shape[1]
    assert sum(len(module._forward_pre_hooks) for stage in model.stages.values() for module in stage.modules()) == 0
    return torch.cat([one.logits for one in found]), torch.cat([one.features for one in found])


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("images")
    for number in range(COUNT):
        (folder / f"{number}.png").write_bytes(encoded(number))
    return [str(folder / f"{number}.png") for number in range(COUNT)]


@pytest.mark.parametrize(
    ("state", "pool"),
    [({}, "cls"), ({"registers": 2, "cls": False}, "avg"), ({"dist": True}, "cls"), (None, "swin")],
    ids=["class token", "average", "distilled", "swin"],
)
def test_features_are_what_timms_classifier_reads(
    state: dict[str, Any] | None, pool: str, paths: list[str], tmp_path: Path, ranks: Ranks
) -> None:
    if state is None:
        sizes = {"patch_size": 2, "embed_dim": 8, "depths": (1, 1), "num_heads": (2, 2), "window_size": 2}
        config = model_config("swin_custom", image_size=SIZE, num_classes=CLASSES, **sizes)
        theirs = timm_swin(config)
        tensors = {name: p.detach() for name, p in theirs.named_parameters()}
    else:
        tensors = timm_state(**state)
        theirs = timm_model(tensors, pool)
    more = {"global_pool": "avg"} if pool == "avg" else {}
    import_weights(saved(tmp_path / "there", tensors, TIMM_CONFIG | more), tmp_path / "weights")
    (found,) = ranks(1).run(computed, tmp_path / "weights", paths)
    prepare, normalize = EvalTransform(SIZE, 0.875), Normalize((0.5,) * 3, (0.5,) * 3)
    images = normalize(torch.stack([prepare(decode(Path(path).read_bytes())) for path in paths]))
    with torch.no_grad():
        tokens = theirs.forward_features(images)
        expected = theirs.forward_head(tokens), theirs.forward_head(tokens, pre_logits=True)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    plain = create_model(weights=tmp_path / "weights").eval()
    torch.testing.assert_close(plain(images), expected[0], atol=1e-6, rtol=1e-5)
    plain(images).square().sum().backward()
    theirs.forward_head(theirs.forward_features(images)).square().sum().backward()
    norms = [sum(p.grad.double().square().sum() for p in model.parameters()) for model in (plain, theirs)]
    torch.testing.assert_close(*norms, rtol=1e-5, atol=0)
    assert all(p.grad.count_nonzero() and type(p) is torch.nn.Parameter for p in plain.parameters())


def test_features_are_float32_whatever_the_precision(paths: list[str], tmp_path: Path, ranks: Ranks) -> None:
    import_weights(saved(tmp_path / "there", timm_state(), TIMM_CONFIG), tmp_path / "weights")
    pool = ranks(1)
    ((_, exact),), ((_, rough),) = (
        pool.run(computed, tmp_path / "weights", paths, precision) for precision in ("fp32", "bf16")
    )
    assert rough.dtype == torch.float32
    assert 0 < (rough - exact).abs().max() < 0.2
