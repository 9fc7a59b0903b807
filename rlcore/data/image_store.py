"""The resized images of a prepared dataset."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from threading import Lock
from typing import Any

from PIL import Image

from rlcore.data.pixels import load_rgb
from rlcore.data.rejects import Unusable
from rlcore.data.table import IMAGES
from rlcore.errors import StorageError
from rlcore.types import ImageRef

_KEPT_BYTES = 256 << 20  # 85 images of 1024 x 1024; sampler and trainer read the same images in turn


class ImageStore:
    """Resized images of one dataset folder, by reference. Safe to use from several threads.

    The latest ``kept_bytes`` stay decoded and are returned again: do not modify them.
    """

    def __init__(self, folder: Path, kept_bytes: int = _KEPT_BYTES) -> None:
        self._folder = folder
        self._kept_bytes = kept_bytes
        self._decoded: OrderedDict[ImageRef, Image.Image] = OrderedDict()
        self._decoded_bytes = 0
        self._lock = Lock()  # the sampler and the read-ahead thread share one store

    def __reduce__(self) -> tuple[Any, ...]:
        return ImageStore, (self._folder, self._kept_bytes)  # a worker starts with an empty cache

    def read(self, ref: ImageRef) -> Image.Image:
        """The RGB image, exactly of ``ref``'s size.

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
                self._decoded_bytes += 3 * ref.width * ref.height
            while self._decoded_bytes > self._kept_bytes:
                oldest, _ = self._decoded.popitem(last=False)
                self._decoded_bytes -= 3 * oldest.width * oldest.height
        return image

    def _decode(self, ref: ImageRef) -> Image.Image:
        path = self._folder / IMAGES / f"{ref.sha256}.png"
        remedy = "Delete the dataset folder and run the resize again."
        try:
            image = load_rgb(path.read_bytes())
        except FileNotFoundError:
            raise StorageError(f"{path} is missing. {remedy}") from None
        except Unusable as unusable:
            raise StorageError(f"{path} does not decode: {unusable.detail}. {remedy}") from None
        if image.size != (ref.width, ref.height):
            raise StorageError(f"{path} is {image.width}x{image.height}, not {ref.width}x{ref.height}. {remedy}")
        return image
