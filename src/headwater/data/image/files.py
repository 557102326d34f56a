"""Image files: detection by suffix, and reading with errors that name the file."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, UnidentifiedImageError

from headwater.core.errors import ConfigError, DataError

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def is_image(path: Path) -> bool:
    """True if the file's suffix is that of an image."""
    return path.suffix.lower() in SUFFIXES


def mode_of(channels: int) -> str:
    """Return Pillow's name of the pixel format with this number of channels.

    Raises:
        ConfigError: if no pixel format has this number of channels.
    """
    if channels not in _MODES:
        raise ConfigError(
            f"expected a model with 1, 3 or 4 channels to read image files, got {channels}",
            where="model",
            remedy="set the model's channels to 1 (gray), 3 (RGB) or 4 (RGB with opacity)",
        )
    return _MODES[channels]


def read_image(path: Path, mode: str | None = None) -> Image.Image:
    """Read an image file.

    Args:
        path: the file.
        mode: pixel format to convert to (see `mode_of`); `None`: keep the format of the file.

    Raises:
        DataError: if the file is missing, damaged or not an image.
    """
    try:
        with Image.open(path) as image:
            # Pillow reads pixels when they are needed, but the file is closed after this block. Both calls
            # read them now.
            return image.convert(mode) if mode is not None else image.copy()
    # Pillow raises a SyntaxError for a broken PNG file.
    except (OSError, UnidentifiedImageError, ValueError, SyntaxError) as error:
        raise DataError(
            f"cannot read the image: {error}", where=str(path), remedy="copy it again, or remove it"
        ) from error
