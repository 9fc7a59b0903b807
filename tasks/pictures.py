"""Pictures as data URLs, for pages, traces and requests."""

from __future__ import annotations

import base64
import io
from pathlib import Path

from PIL import Image


def png_url(image: Image.Image) -> str:
    """A data URL of the picture as PNG."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def small_picture(path: Path, most_pixels: int) -> str:
    """A data URL of the picture in a file, made smaller if it is wider or higher than ``most_pixels``."""
    with Image.open(path) as image:
        image.thumbnail((most_pixels, most_pixels))
        return png_url(image)
