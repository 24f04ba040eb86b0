"""Models of the user: their description, what is refused, and how they are registered."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import vitpar
from vitpar import Execution, parallelize, parse, read_recipe
from vitpar.errors import ModelError
from vitpar.models.description import TensorSpec
from vitpar.models.families import FAMILIES, config_from_json, config_to_json, model_config
from vitpar.models.layers import LayeredModel
from vitpar.models.own import load
from vitpar.parallel.attention import choose_attention, use_attention
from vitpar.parallel.precision import resolve_precision
from vitpar.tasks import task_of
from vitpar.tasks.image_input import ImageInput

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model.py"


def mixer(**options: object) -> vitpar.ModelConfig:
    return model_config(load(f"{EXAMPLE}:Mixer"), **options)


def file_with(folder: Path, text: str) -> str:
    path = folder / "mine.py"
    path.write_text(text)
    return f"{path}:Mine"


@dataclass(frozen=True)
class Narrowing(vitpar.OwnModel):
    """A model whose blocks halve the tokens once, with the layer that a test gives it as embed."""

    image_size: int = 8
    num_classes: int = 3
    depth: int = 3

    def build_layer(self, name: str) -> vitpar.Layer:
        if name == "embed":
            return Pixels()
        return Means(self.num_classes) if name == "head" else Halve() if name == "blocks.1" else Scale()


class Pixels(vitpar.Layer):
    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(2).transpose(1, 2).contiguous()


class Scale(vitpar.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Halve(vitpar.Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, ::2].clone()


class Means(vitpar.Layer):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(3, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.mean(dim=1))


def test_description_of_the_example_equals_its_modules() -> None:
    config = mixer(width=48, depth=2, num_classes=7)
    with torch.device("meta"):
        layers = LayeredModel(config).layers()
    assert {name: layer.parameters for name, layer in config.layers.items()} == {
        name: {key: tuple(p.shape) for key, p in layer.named_parameters()} for name, layer in layers.items()
    }
    assert [layer.kind for layer in config.layers.values()] == ["embed", "block", "block", "head"]
    x = torch.empty(1, 3, 32, 32, device="meta")
    with FlopCounterMode(display=False) as counter:
        LayeredModel(config).to("meta")(x)
    assert config.flops == 3 * counter.get_total_flops()


def test_kinds_and_shapes_follow_the_layers() -> None:
    layers = Narrowing().layers
    assert [layer.kind for layer in layers.values()] == ["embed", "block1", "block2", "block3", "head"]
    assert [layer.gives.tokens for layer in layers.values()] == [64, 64, 32, 32, 1]


def test_tp_is_refused_with_the_numbers_it_has_to_divide() -> None:
    with pytest.raises(vitpar.UserError, match=r"tp5 does not divide the \d+ \w+ features of"):
        vitpar.validate(vitpar.parse("tp5"), mixer(width=48), 10)
    with pytest.raises(vitpar.UserError, match=r"cannot split the layers 'block' .*: leave \+2d out"):
        vitpar.validate(vitpar.parse("tp4+2d"), mixer(), 8)


def test_configuration_survives_json_only_while_it_is_registered() -> None:
    config = mixer(width=48)
    record = config_to_json(config)
    assert config_from_json(record) == config
    del FAMILIES["own_model.py:Mixer"]
    with pytest.raises(ModelError, match=r"own_model\.py:Mixer, a model of your own: give the file"):
        config_from_json(record)


def test_a_recipe_cannot_load_a_file() -> None:
    recipe = vitpar.read_recipe(None, {"data.path": "x", "train.steps": 1, "model.name": f"{EXAMPLE}:Mixer"})
    with pytest.raises(ModelError, match="which only the command line can name"):
        recipe.config(10)


def test_options_of_a_recipe_reach_the_model() -> None:
    name = load(f"{EXAMPLE}:Mixer")
    settings = {"data.path": "x", "train.steps": 1, "model.name": name}
    recipe = vitpar.read_recipe(None, settings, ["model.options.width=96", "model.options.depth=2"])
    config = recipe.config(10)
    assert (config.num_blocks, config.layers["embed"].gives.features, config.num_classes) == (2, 96, 10)


CLASS = """
import vitpar
from dataclasses import dataclass
@dataclass(frozen=True)
class Mine(vitpar.OwnModel):
    depth: int = 1
    def build_layer(self, name):
        {body}
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "has no model called 'Mine': name a dataclass that derives from vitpar.OwnModel"),
        ("1/0", "fails in line 1: ZeroDivisionError"),
        ("def f(:", "SyntaxError"),
        (CLASS.format(body="return 3"), "layer embed of .*Mine is a int: derive its class from vitpar.Layer"),
        (CLASS.format(body="raise KeyError('x')"), "layer embed of .*Mine fails: KeyError"),
    ],
)
def test_files_and_layers_that_break_the_contract_are_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        _ = model_config(load(file_with(tmp_path, text)), image_size=8).layers
    with pytest.raises(ModelError, match="there is no file"):
        load(f"{tmp_path}/none.py:Mine")
    with pytest.raises(ModelError, match="there is a family called vit already"):
        vitpar.register(Narrowing, "vit")


def test_a_layer_that_gives_a_view_is_refused() -> None:
    class Views(Narrowing):
        def build_layer(self, name: str) -> vitpar.Layer:
            class View(vitpar.Layer):
                def forward(self, images: Tensor) -> Tensor:
                    return images.flatten(2).transpose(1, 2)

            return View()

    with pytest.raises(ModelError, match=r"gives a view of another tensor: end its forward with \.contiguous"):
        _ = Views().layers


def test_a_head_that_ignores_the_number_of_classes_is_refused() -> None:
    class Fixed(Narrowing):
        def build_layer(self, name: str) -> vitpar.Layer:
            return Means(5) if name == "head" else super().build_layer(name)

    with pytest.raises(ModelError, match="gives 5 logits, but num_classes is 3"):
        _ = Fixed().layers


@dataclass(frozen=True)
class Tagger(vitpar.OwnModel):
    """Token ids in, logits of every token out."""

    depth: int = 1
    tags: int = 5

    @property
    def input(self) -> vitpar.InputSpec:
        return vitpar.InputSpec((6,), "int64")

    @property
    def output_shape(self) -> tuple[int, ...]:
        return 6, 5

    def build_layer(self, name: str) -> vitpar.Layer:
        return {"embed": Lookup, "head": Tags}.get(name, Same)(self.tags)


class Lookup(vitpar.Layer):
    def __init__(self, tags: int) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids)


class Same(vitpar.Layer):
    def __init__(self, tags: int) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc(x)


class Tags(vitpar.Layer):
    TENSOR_PARALLEL: ClassVar[Mapping[str, str]] = {"gathered": "gathered", "fc": "output"}

    def __init__(self, tags: int) -> None:
        super().__init__()
        self.gathered, self.fc = nn.Identity(), nn.Linear(8, tags, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.gathered(x))


def test_models_of_text_are_described() -> None:
    embed, block, head = Tagger().layers.values()
    assert embed.takes is None and embed.gives == block.takes == TensorSpec(6, 8)
    assert head.gives == TensorSpec(6, 5) and "sp" in head.modes
    assert {part.name: part.role for part in head.parts} == {"gathered": "gathered", "fc": "output"}
    with pytest.raises(ModelError, match=r"gives logits of shape \[6, 4\], but output_shape is \[6, 5\]: make them"):
        _ = Tagger(tags=4).layers


def test_the_attention_kernel_of_the_recipe_is_used(alone: None) -> None:
    """Sets the kernel without comparing any: the attention of an own model is not described."""
    plan = vitpar.validate(vitpar.parse("dp1"), Narrowing(), 4)
    precision, cpu = resolve_precision("fp32"), torch.device("cpu")
    try:
        assert choose_attention("math", Narrowing(), plan, 4, precision, cpu).backend == "math"
        assert not torch.backends.cuda.flash_sdp_enabled()
    finally:
        use_attention(None)


def test_images_of_other_channels_are_refused(alone: None) -> None:
    model = parallelize(mixer(channels=1), parse("dp1"), Execution(8), "cpu")
    with pytest.raises(ModelError, match=r"takes images of 1 channel, but images are decoded to 3, grey ones too"):
        recipe = read_recipe(None, {"data.path": "none", "train.steps": 1})
        ImageInput(recipe, model, task_of(recipe, 4))
