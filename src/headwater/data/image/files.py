"""Image files: finding them, and reading them with errors that name them."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, UnidentifiedImageError

from headwater.core.errors import ConfigError, DataError

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def is_image(path: Path) -> bool:
    """Whether the file's name is that of an image."""
    return path.suffix.lower() in SUFFIXES


def mode_of(channels: int) -> str:
    """What Pillow calls images with so many channels.

    Raises:
        ConfigError: if there are none.
    """
    if channels not in _MODES:
        raise ConfigError(
            f"there are no image files with {channels} channels",
            where="model",
            remedy="set the model's channels to 1 (gray), 3 (colours) or 4 (with opacity)",
        )
    return _MODES[channels]


def read_image(path: Path, mode: str | None = None) -> Image.Image:
    """The image in a file.

    Args:
        path: the file.
        mode: what its pixels are converted to, see `mode_of`; as they are if not given.

    Raises:
        DataError: if it is missing, damaged or no image.
    """
    try:
        with Image.open(path) as image:
            return image.convert(mode) if mode is not None else image.copy()
    except (OSError, UnidentifiedImageError, ValueError, SyntaxError) as error:
        raise DataError(
            f"cannot read the image: {error}", where=str(path), remedy="copy it again, or remove it"
        ) from error
