"""Images on their way into the model: read ahead, embedded once by a frozen tower, and the tower's arguments."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rlcore.batch import ImageFeatures, moved
from rlcore.families.protocol import Images
from rlcore.types import ImageRef

# Pixels per rank: 80 images of 1024 x 1024, or 340 of 512 x 512. A rank's share of a rollout batch of 512 problems on
# eight ranks is 64 images. Each is needed again for the reference's log-probs and for each epoch over the batch.
_READ_BYTES = 2 << 30
_EMBEDDED_BYTES = 2 << 30  # features per rank: 100 images of 1,000 tokens, each 4 x 2,560 values of bfloat16


def feature_bytes(image: ImageRef) -> int:
    """Bytes of an image's ``pixel_values``: float32, 3 channels, and two equal frames of a still image. Tiles have no
    second frame, and the tile of the whole image takes at most half as much as the image. A video has pairs of frames.
    """
    return image.width * image.height * 3 * 2 * 4 * image.frame_pairs


class ReadAhead:
    """A cache of images' features. A thread reads them after ``start``; ``of`` reads those that were not started.

    ``start`` evicts used images only. Otherwise a batch larger than the cache would lose each image before training.
    """

    def __init__(self, read: Callable[[ImageRef], ImageFeatures], kept_bytes: int = _READ_BYTES) -> None:
        self._read, self._capacity = read, kept_bytes
        self._pool = ThreadPoolExecutor(1)  # image processors are not thread-safe
        self._futures: OrderedDict[ImageRef, Future[ImageFeatures]] = OrderedDict()  # least recently used first
        self._used: set[ImageRef] = set()
        self.held_bytes = 0

    def start(self, image: ImageRef) -> None:
        if image not in self._futures and self._make_room(feature_bytes(image), self._used):
            self._submit(image)

    def of(self, image: ImageRef) -> ImageFeatures:
        """The features of an image. Waits until they are read; raises the error of the read."""
        if image not in self._futures:
            size = feature_bytes(image)
            if not self._make_room(size, self._used):
                self._make_room(size, set(self._futures))
            self._submit(image)
        self._futures.move_to_end(image)
        self._used.add(image)
        return self._futures[image].result()

    def _submit(self, image: ImageRef) -> None:
        self._futures[image] = self._pool.submit(self._read, image)
        self.held_bytes += feature_bytes(image)

    def _make_room(self, size: int, removable: set[ImageRef]) -> bool:
        """Evict as few images of ``removable`` as possible; return whether ``size`` bytes fit."""
        for image in [image for image in self._futures if image in removable]:
            if self.held_bytes + size <= self._capacity:
                break
            del self._futures[image]
            self._used.discard(image)
            self.held_bytes -= feature_bytes(image)
        return self.held_bytes + size <= self._capacity


class FrozenTower:
    """Embeds images with a tower that does not train, and caches the most recent features.

    Every rank holds the whole tower, so this needs no collective. The tower takes one image at a time: the features
    then do not depend on the microbatch that asks first, nor on a restart.
    """

    def __init__(
        self,
        tower: nn.Module,
        images: Images,
        read: Callable[[ImageRef], ImageFeatures],
        *,
        device: torch.device,
        dtype: torch.dtype,
        kept_bytes: int = _EMBEDDED_BYTES,
    ) -> None:
        """
        Args:
            tower: on ``device``. It computes in ``dtype``, whatever the dtype of its weights.
        """
        self._tower, self._images, self._read, self._device, self._dtype = tower, images, read, device, dtype
        self._cache: OrderedDict[ImageRef, ImageFeatures] = OrderedDict()
        self._free_bytes = kept_bytes

    def of(self, image: ImageRef) -> ImageFeatures:
        """The image with its ``embedded`` features. Raises the error of the read."""
        if image in self._cache:
            self._cache.move_to_end(image)
            return self._cache[image]
        raw = self._read(image)
        embedded = self._embed(raw)
        self._cache[image] = replace(raw, pixel_values=raw.pixel_values[:0], embedded=embedded)
        self._free_bytes -= embedded.nbytes
        while self._free_bytes < 0 and len(self._cache) > 1:
            _, oldest = self._cache.popitem(last=False)
            self._free_bytes += 0 if oldest.embedded is None else oldest.embedded.nbytes
        return self._cache[image]

    @torch.no_grad()
    def _embed(self, image: ImageFeatures) -> Tensor:
        arguments = tower_arguments(self._images, self._tower.config, torch.tensor([image.grid_thw]), self._device)
        weights = {name: weight.to(self._dtype) for name, weight in self._tower.named_parameters()}
        pixels = moved(image.pixel_values.to(self._dtype), self._device)
        return self._images.features(functional_call(self._tower, weights, (pixels,), arguments))


def tower_arguments(images: Images, config: Any, grids: Tensor, device: torch.device) -> dict[str, Any]:
    """``Images.tower_arguments``, computed on the CPU, with their tensors moved to ``device``.

    transformers computes them on the device and reads numbers back, which waits for the pass that is still running.
    """
    arguments = images.tower_arguments(config, grids)
    return {name: moved(value, device) if isinstance(value, Tensor) else value for name, value in arguments.items()}
