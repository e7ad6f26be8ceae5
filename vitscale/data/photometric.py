"""What is done to the colours and shapes of a training image after crop and flip: RandAugment and its kin.

All of it is drawn from (seed, epoch, sample id), in a stream of numbers of its own, so that turning it on moves no
crop. Pillow does the work: it lets other threads run and starts none of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter, ImageOps
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F

from vitscale.config.schema import DataConfig

Pixels: TypeAlias = NDArray[np.uint8]
Operation: TypeAlias = Literal[
    "identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "color", "contrast",
    "sharpness", "posterize", "solarize", "auto_contrast", "equalize",
]  # fmt: skip
OPERATIONS: tuple[Operation, ...] = (
    "identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "color", "contrast",
    "sharpness", "posterize", "solarize", "auto_contrast", "equalize",
)  # fmt: skip
"""RandAugment's (https://arxiv.org/abs/1909.13719), in torchvision's order; each as likely as the others."""

DOMAIN = 2
"""Of the random numbers, see `sample_generator`."""
_SIGNED = frozenset(OPERATIONS[1:10])
_STRONGEST = 10.0
"""The magnitude at which operations are as strong as in AutoAugment; AugReg goes on to 20."""
_BLUR = (0.1, 2.0)
_ERASED_AREA, _ERASED_RATIO, _ERASE_TRIES = (0.02, 1 / 3), (0.3, 3.3), 10


def is_on(config: DataConfig) -> bool:
    """Whether a config asks for anything here."""
    return config.augment != "none" or config.color_jitter > 0 or config.erasing > 0


def augment(image: Pixels, config: DataConfig, random: np.random.Generator) -> Pixels:
    """One training image, changed as the config says.

    Args:
        image: uint8 RGB `[height, width, 3]`.
        config: Which changes, and how strong.
        random: The sample's own numbers.
    """
    picture = Image.fromarray(image)
    if config.augment == "randaugment":
        for _ in range(config.randaugment_ops):
            operation = OPERATIONS[int(random.integers(len(OPERATIONS)))]
            sign = -1.0 if operation in _SIGNED and random.random() < 0.5 else 1.0
            picture = apply(picture, operation, sign * config.randaugment_magnitude / _STRONGEST)
    elif config.augment == "three_augment":
        picture = three_augment(picture, random)
    if config.color_jitter:
        picture = color_jitter(picture, config.color_jitter, random)
    changed = np.array(picture)
    if config.erasing and random.random() < config.erasing:
        erase(changed, config, random)
    return changed


def apply(picture: Image.Image, operation: Operation, strength: float) -> Image.Image:
    """One operation of RandAugment as torchvision defines it.

    Args:
        picture: RGB.
        operation: Which.
        strength: 1 is torchvision's strongest (bin 30 of 31); beyond that angles, distances and factors go on growing,
            and are cut where there is nothing more (a factor of 0, one bit, a threshold of 0). Negative mirrors.
    """
    width, height = picture.size
    magnitude = abs(strength)
    simple: dict[str, Callable[[], Image.Image]] = {
        "identity": lambda: picture,
        "shear_x": lambda: _shear(picture, x=0.3 * strength),
        "shear_y": lambda: _shear(picture, y=0.3 * strength),
        "translate_x": lambda: _affine(picture, translate=[int(150 / 331 * width * strength), 0]),
        "translate_y": lambda: _affine(picture, translate=[0, int(150 / 331 * height * strength)]),
        "rotate": lambda: F.rotate(picture, 30 * strength, interpolation=InterpolationMode.NEAREST),
        "brightness": lambda: F.adjust_brightness(picture, max(0.0, 1 + 0.9 * strength)),
        "color": lambda: F.adjust_saturation(picture, max(0.0, 1 + 0.9 * strength)),
        "contrast": lambda: F.adjust_contrast(picture, max(0.0, 1 + 0.9 * strength)),
        "sharpness": lambda: F.adjust_sharpness(picture, max(0.0, 1 + 0.9 * strength)),
        "posterize": lambda: F.posterize(picture, max(1, 8 - round(4 * magnitude))),
        "solarize": lambda: F.solarize(picture, max(0.0, 255 * (1 - magnitude))),
        "auto_contrast": lambda: F.autocontrast(picture),
        "equalize": lambda: F.equalize(picture),
    }
    return simple[operation]()


def three_augment(picture: Image.Image, random: np.random.Generator) -> Image.Image:
    """Grayscale, solarize or blur, each as likely (DeiT III, https://arxiv.org/abs/2204.07118)."""
    choice = int(random.integers(3))
    sigma = random.uniform(*_BLUR)
    if choice == 0:
        gray: Image.Image = F.to_grayscale(picture, num_output_channels=3)
        return gray
    if choice == 1:
        return ImageOps.solarize(picture, 128)
    return picture.filter(ImageFilter.GaussianBlur(sigma))


def color_jitter(picture: Image.Image, strength: float, random: np.random.Generator) -> Image.Image:
    """Brightness, contrast and saturation by factors from 1 - strength to 1 + strength, in any order."""
    factors = random.uniform(max(0.0, 1 - strength), 1 + strength, 3).tolist()
    for number in random.permutation(3).tolist():
        change = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation)[number]
        picture = change(picture, factors[number])
    return picture


def erase(image: Pixels, config: DataConfig, random: np.random.Generator) -> None:
    """Overwrite a rectangle, in place (https://arxiv.org/abs/1708.04896): area and aspect as in torchvision.

    It becomes the mean pixel, or noise of the mean and deviation that pixels are normalised by.
    """
    height, width = image.shape[:2]
    low, high = (math.log(ratio) for ratio in _ERASED_RATIO)
    for _ in range(_ERASE_TRIES):
        area = height * width * random.uniform(*_ERASED_AREA)
        aspect = math.exp(random.uniform(low, high))
        rows, columns = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < rows < height and 0 < columns < width:
            break
    else:
        return
    top, left = int(random.integers(height - rows + 1)), int(random.integers(width - columns + 1))
    mean = 255 * np.array(config.mean)
    fill = np.broadcast_to(mean, (rows, columns, 3))
    if config.erasing_fill == "noise":
        fill = random.normal(mean, 255 * np.array(config.std), (rows, columns, 3))
    image[top : top + rows, left : left + columns] = np.rint(fill).clip(0, 255)


def _affine(picture: Image.Image, *, translate: list[int]) -> Image.Image:
    moved: Image.Image = F.affine(
        picture, angle=0.0, translate=translate, scale=1.0, shear=[0.0, 0.0], interpolation=InterpolationMode.NEAREST
    )
    return moved


def _shear(picture: Image.Image, *, x: float = 0.0, y: float = 0.0) -> Image.Image:
    """Sheared about the upper left corner, as in AutoAugment and torchvision."""
    sheared: Image.Image = F.affine(
        picture, angle=0.0, translate=[0, 0], scale=1.0, shear=[math.degrees(math.atan(x)), math.degrees(math.atan(y))],
        interpolation=InterpolationMode.NEAREST, center=[0, 0],
    )  # fmt: skip
    return sheared
