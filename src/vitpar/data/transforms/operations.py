"""What policies do to images: Pillow's operations by name, each with a level from 0 to 10.

Names and ranges are those of AutoAugment and RandAugment (Cubuk et al. 2019, 2020), with translations in parts of the
image's size. For some, a higher level is a weaker change (Posterize) or one in either direction about the middle
(Color): with `increasing` it is always a stronger one. A level gives the same argument as in timm.
"""

from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from vitpar.data.randomness import Draws

HIGHEST = 10  # level
_DEGREES, _SHEAR, _TRANSLATION = 30.0, 0.3, 0.45


@dataclass(frozen=True)
class Setting:
    """How an operation is applied: random numbers, the colour of what comes in from outside, the sense of levels."""

    draws: Draws
    fill: tuple[int, int, int]
    increasing: bool = False

    def signed(self, value: float) -> float:
        """`value` or its negative, as likely."""
        return value if self.draws.uniform() < 0.5 else -value


Operation = Callable[[Image.Image, float, Setting], Image.Image]


def _affine(image: Image.Image, matrix: tuple[float, ...], setting: Setting) -> Image.Image:
    bilinear = Image.Resampling.BILINEAR
    return image.transform(image.size, Image.Transform.AFFINE, matrix, bilinear, fillcolor=setting.fill)


def _rotate(image: Image.Image, level: float, setting: Setting) -> Image.Image:
    angle = setting.signed(level / HIGHEST * _DEGREES)
    return image.rotate(angle, Image.Resampling.BILINEAR, fillcolor=setting.fill)


def _shear_x(image: Image.Image, level: float, setting: Setting) -> Image.Image:
    return _affine(image, (1, setting.signed(level / HIGHEST * _SHEAR), 0, 0, 1, 0), setting)


def _shear_y(image: Image.Image, level: float, setting: Setting) -> Image.Image:
    return _affine(image, (1, 0, 0, setting.signed(level / HIGHEST * _SHEAR), 1, 0), setting)


def _translate_x(image: Image.Image, level: float, setting: Setting) -> Image.Image:
    return _affine(image, (1, 0, setting.signed(level / HIGHEST * _TRANSLATION) * image.width, 0, 1, 0), setting)


def _translate_y(image: Image.Image, level: float, setting: Setting) -> Image.Image:
    return _affine(image, (1, 0, 0, 0, 1, setting.signed(level / HIGHEST * _TRANSLATION) * image.height), setting)


def _enhanced(kind: Callable[[Image.Image], ImageEnhance._Enhance]) -> Operation:
    def apply(image: Image.Image, level: float, setting: Setting) -> Image.Image:
        part = level / HIGHEST
        factor = max(0.1, 1 + setting.signed(0.9 * part)) if setting.increasing else 0.1 + 1.8 * part
        return kind(image).enhance(factor)

    return apply


def _posterize(image: Image.Image, level: float, setting: Setting) -> Image.Image:
    """Keep 0 to 4 bits of a colour as RandAugment's reference code does, or with `increasing` 4 down to 0."""
    bits = int(level / HIGHEST * 4)
    return _keep_bits(image, 4 - bits if setting.increasing else bits)


def _posterize_original(image: Image.Image, level: float, _: Setting) -> Image.Image:
    """Keep 4 to 8 bits of a colour, as AutoAugment does."""
    return _keep_bits(image, 4 + int(level / HIGHEST * 4))


def _keep_bits(image: Image.Image, bits: int) -> Image.Image:
    return ImageOps.posterize(image, bits) if bits else Image.new("RGB", image.size)


def _solarize(image: Image.Image, level: float, setting: Setting) -> Image.Image:
    threshold = int(level / HIGHEST * 256)
    return ImageOps.solarize(image, 256 - threshold if setting.increasing else threshold)


def _solarize_add(image: Image.Image, level: float, _: Setting) -> Image.Image:
    added = int(level / HIGHEST * 110)
    return image.point([min(255, value + added) if value < 128 else value for value in range(256)] * 3)


def _blur(image: Image.Image, _: float, setting: Setting) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(setting.draws.uniform(0.1, 2.0)))


OPERATIONS: dict[str, Operation] = {
    "AutoContrast": lambda image, level, setting: ImageOps.autocontrast(image),
    "Equalize": lambda image, level, setting: ImageOps.equalize(image),
    "Invert": lambda image, level, setting: ImageOps.invert(image),
    "Rotate": _rotate,
    "Posterize": _posterize,
    "PosterizeOriginal": _posterize_original,
    "Solarize": _solarize,
    "SolarizeAdd": _solarize_add,
    "Color": _enhanced(ImageEnhance.Color),
    "Contrast": _enhanced(ImageEnhance.Contrast),
    "Brightness": _enhanced(ImageEnhance.Brightness),
    "Sharpness": _enhanced(ImageEnhance.Sharpness),
    "ShearX": _shear_x,
    "ShearY": _shear_y,
    "TranslateX": _translate_x,
    "TranslateY": _translate_y,
    "Grayscale": lambda image, level, setting: image.convert("L").convert("RGB"),
    "GaussianBlur": _blur,
}
