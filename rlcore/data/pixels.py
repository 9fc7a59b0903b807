"""Images: their size from the header, decoding to RGB, their size on the grid of a model's vision tower, and the
resized images of a prepared dataset.

The bytes are not trusted: the size is checked before decoding, only known formats are opened, and every failure is an
``Unusable`` with a reason. Pillow's warnings never leave this module.
"""

from __future__ import annotations

import io
import math
import re
import struct
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.PngImagePlugin import PngInfo

from rlcore.data.rejects import Reason, Unusable
from rlcore.data.table import IMAGES
from rlcore.errors import StorageError
from rlcore.families.protocol import Resizing
from rlcore.types import ImageRef

IMAGE_MARKER = "<image>"
VIDEO_MARKER = "<video>"
MARKERS = re.compile(f"({IMAGE_MARKER}|{VIDEO_MARKER})")

# Without TIFF, whose library writes to stderr about damaged files, and Python cannot filter that.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
_KEPT_BYTES = 256 << 20  # 85 images of 1024 x 1024; sampler and trainer read the same images in turn
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


def resized(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The image in this width and height, as datasets hold it."""
    return image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)


_FRAMES = "frames"  # names of a video's entries in its PNG file
_SECONDS = "seconds per frame"


def video_file(frames: Sequence[Image.Image], seconds_per_frame: float) -> bytes:
    """Frames of one size side by side, as a PNG file that also names their number and times."""
    width, height = frames[0].size
    strip = Image.new("RGB", (width * len(frames), height))
    for number, frame in enumerate(frames):
        strip.paste(frame, (number * width, 0))
    facts = PngInfo()
    facts.add_text(_FRAMES, str(len(frames)))
    facts.add_text(_SECONDS, str(seconds_per_frame))
    out = io.BytesIO()
    strip.save(out, "PNG", compress_level=1, pnginfo=facts)
    return out.getvalue()


def frames_in(image: Image.Image, ref: ImageRef) -> list[Image.Image]:
    """The frames of a video's file; of an image, the image."""
    lefts = range(0, ref.frames * ref.width, ref.width)
    return [image] if ref.frames == 1 else [image.crop((x, 0, x + ref.width, ref.height)) for x in lefts]


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


class ImageStore:
    """Resized images of dataset folders, by reference. Safe to use from several threads.

    The latest ``kept_bytes`` stay decoded and are returned again: do not modify them.
    """

    def __init__(self, folder: Path, kept_bytes: int = _KEPT_BYTES) -> None:
        self._folders = [folder]
        self._kept_bytes = kept_bytes
        self._decoded: OrderedDict[ImageRef, Image.Image] = OrderedDict()
        self._decoded_bytes = 0
        self._lock = Lock()  # the sampler and the read-ahead thread share one store

    def __reduce__(self) -> tuple[Any, ...]:
        return _store_of, (self._folders, self._kept_bytes)  # a worker starts with an empty cache

    def add(self, folder: Path) -> None:
        """Also read the images of this dataset, which was resized with the same settings."""
        self._folders.append(folder)

    def read(self, ref: ImageRef) -> Image.Image:
        """The RGB image, exactly of ``ref``'s size. Of a video, its frames side by side.

        Raises:
            StorageError: the file is missing, does not decode, or has another size.
        """
        with self._lock:
            if ref in self._decoded:
                self._decoded.move_to_end(ref)
                return self._decoded[ref]
        image = self._decode(ref)
        with self._lock:
            if ref not in self._decoded:
                self._decoded[ref] = image
                self._decoded_bytes += 3 * math.prod(ref.file_size)
            while self._decoded_bytes > self._kept_bytes:
                oldest, _ = self._decoded.popitem(last=False)
                self._decoded_bytes -= 3 * math.prod(oldest.file_size)
        return image

    def _decode(self, ref: ImageRef) -> Image.Image:
        paths = [folder / IMAGES / f"{ref.sha256}.png" for folder in self._folders]
        path = next((path for path in paths if path.exists()), paths[0])
        remedy = "Delete the dataset folder and run the resize again."
        try:
            image = load_rgb(path.read_bytes())
        except FileNotFoundError:
            raise StorageError(f"{path} is missing. {remedy}") from None
        except Unusable as unusable:
            raise StorageError(f"{path} does not decode: {unusable.detail}. {remedy}") from None
        if image.size != ref.file_size:
            wanted = "{}x{}".format(*ref.file_size)
            raise StorageError(f"{path} is {image.width}x{image.height}, not {wanted}. {remedy}")
        return image


def _store_of(folders: Sequence[Path], kept_bytes: int) -> ImageStore:
    store = ImageStore(folders[0], kept_bytes)
    for folder in folders[1:]:
        store.add(folder)
    return store
