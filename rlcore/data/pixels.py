"""One image: its size from the header, decoding to RGB, and its size on the grid of a model's vision tower.

The bytes are not trusted: the size is checked before decoding, only known formats are opened, and every failure is an
``Unusable`` with a reason. Pillow's warnings never leave this module.
"""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from PIL import Image, UnidentifiedImageError

from rlcore.data.rejects import Reason, Unusable
from rlcore.families.protocol import Resizing

# Without TIFF, whose library writes to stderr about damaged files, and Python cannot filter that.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
MAX_SOURCE_PIXELS = 64 * 2**20  # 256 MiB per process, decoded as RGBA

_ORIENTATION_TAG = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# What Pillow's plugins raise for damaged files; they have no common base class.
_DAMAGED = (
    OSError, ValueError, SyntaxError, EOFError, KeyError, IndexError, TypeError, AttributeError,
    OverflowError, NotImplementedError, RuntimeError, struct.error, zlib.error,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Header:
    """Facts about an image that need no decoding."""

    width: int  # pixels, after the EXIF orientation is applied
    height: int
    orientation: int  # EXIF, 1 to 8
    ready: bool  # an upright RGB PNG without transparency, which needs no conversion if its size fits


def stable_target_size(width: int, height: int, rule: Resizing, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """``rule.target_size``, but only if applying the rule to the result changes nothing.

    Trainer and sampler apply the rule again to the stored image. If that changed the size (very long images, or bounds
    with no grid size between them), the numbers of image tokens would differ.

    Raises:
        Unusable: IMAGE_SHAPE, if the rule refuses the image, or changes its own result.
    """
    bounds = f"data.min_pixels {min_pixels}, data.max_pixels {max_pixels}"
    try:
        size = rule.target_size(width, height, min_pixels, max_pixels)
        again = rule.target_size(*size, min_pixels, max_pixels)
    except ValueError as error:
        raise Unusable(Reason.IMAGE_SHAPE, f"{width}x{height} does not fit the patch grid: {error}") from None
    if again != size:
        detail = f"{width}x{height} has no stable size on a grid of {rule.factor} within {bounds}: {size}, then {again}"
        raise Unusable(Reason.IMAGE_SHAPE, detail)
    return size


def read_header(data: bytes) -> Header:
    """Size and orientation of an encoded image, without decoding it.

    Raises:
        Unusable: unknown format, more than one frame, more than MAX_SOURCE_PIXELS, or an unreadable header.
    """
    with _opened(data) as image:
        return _header(image)


def load_rgb(data: bytes) -> Image.Image:
    """Decode to an upright RGB image. Transparency becomes white, 16-bit grey is scaled to 8 bits.

    Raises:
        Unusable: as ``read_header``, or the pixel data is truncated or damaged.
    """
    with _opened(data) as image:
        orientation = _header(image).orientation
        image.load()
        rgb = _to_rgb(image)
        return rgb.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else rgb


@contextmanager
def _opened(data: bytes) -> Iterator[Image.Image]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                _refuse_by_header(image)
                yield image
        except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
            raise Unusable(Reason.IMAGE_TOO_LARGE, str(error)) from None
        except UnidentifiedImageError:
            detail = (
                f"{len(data)} bytes starting with {data[:8]!r} are no {', '.join(FORMATS)}, or have a broken header"
            )
            raise Unusable(Reason.IMAGE_FORMAT, detail) from None
        except _DAMAGED as error:
            raise Unusable(Reason.IMAGE_DAMAGED, f"{type(error).__name__}: {error}") from None


def _refuse_by_header(image: Image.Image) -> None:
    width, height = image.size
    if width * height > MAX_SOURCE_PIXELS:
        raise Unusable(Reason.IMAGE_TOO_LARGE, f"{width}x{height} is above {MAX_SOURCE_PIXELS} pixels")
    # A multi-picture JPEG (a phone's photo with its depth map) opens the photo; other files with frames are animations.
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":
        raise Unusable(Reason.IMAGE_ANIMATED, f"{image.format} with {frames} frames")


def _header(image: Image.Image) -> Header:
    orientation = _orientation(image)
    width, height = image.size if orientation < 5 else image.size[::-1]
    ready = image.format == "PNG" and image.mode == "RGB" and orientation == 1 and "transparency" not in image.info
    return Header(width, height, orientation, ready)


def _orientation(image: Image.Image) -> int:
    # A PNG's EXIF chunk may come after the pixels. Reading it there would decode them, so it is ignored.
    if image.format == "PNG" and "exif" not in image.info:
        return 1
    try:
        value = image.getexif().get(_ORIENTATION_TAG, 1)
    except _DAMAGED:  # broken metadata of a good image: viewers show it upright
        return 1
    return value if value in _UPRIGHT else 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        return _deep_grey(image).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        # First to RGBA, because palettes and premultiplied modes convert to nothing else.
        layered = image if image.mode == "RGBA" else image.convert("RGBA")
        if layered.getchannel("A").getextrema() == (255, 255):
            return layered.convert("RGB")
        page = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(page, layered).convert("RGB")
    return image.convert("RGB")


def _deep_grey(image: Image.Image) -> Image.Image:
    # Pillow clips 16 bits to 8, which makes most of a scan white.
    values = np.asarray(image)
    if values.min() < 0 or values.max() > 65535:
        raise Unusable(Reason.IMAGE_FORMAT, f"grey values of mode {image.mode} exceed 16 bits")
    return Image.fromarray(((values.astype(np.uint32) + 128) // 257).astype(np.uint8))


IMAGE_MARKER = "<image>"
