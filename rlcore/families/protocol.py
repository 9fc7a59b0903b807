"""What rlflow must know about a model family. Each file of this package implements it for one family.

Importing this package loads neither torch nor transformers. Only the methods that take modules or tensors need them.
Letters as in ``rlcore.batch``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from rlcore.flops import TowerShape
from rlcore.types import ImageRef, Ints

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor, nn

Grid = tuple[int, int, int]
"""One image in patches, before merging: frames (of a video: groups of frames), rows, columns. Of an image in tiles: the
number of tiles, and the rows and columns of pixels of a tile."""


@dataclass(frozen=True, slots=True)
class LayerMask:
    """Which tokens a decoder layer attends to. ``models.loading`` refuses kinds that the trainer does not compute."""

    kind: str  # transformers' name: full_attention, sliding_attention, linear_attention, ...
    window: int | None = None  # number of last tokens that the layer attends to; None: the whole sequence


@dataclass(frozen=True, slots=True)
class Caps:
    """Soft caps, cap * tanh(x / cap); None: no cap."""

    scores: float | None = None  # of attention, before the softmax
    logits: float | None = None


class Family(Protocol):
    """A text family, or with ``images`` a vision-language family."""

    @property
    def images(self) -> Images | None:
        """None: the family takes text only."""

    @property
    def experts(self) -> Experts | None:
        """None: the layers of the family have no experts."""

    @property
    def recurrence(self) -> Recurrence | None:
        """None: all layers of the family have attention."""

    def decoder(self, hf: Any) -> Any:
        """The module with the embeddings and ``layers``, without the head."""

    @property
    def adapted(self) -> tuple[str, ...] | None:
        """The last parts of the names of the linear layers that LoRA adapts. None: all of them. In a vision tower LoRA
        adapts all, and vLLM needs their names here."""

    def require_plain(self, config: Any) -> None:
        """Refuse settings that change logits or attention scores in a way that the trainer does not compute.

        Raises:
            ModelError: the model has such a setting.
        """

    def masks(self, config: Any) -> list[LayerMask]:
        """One for each decoder layer."""

    def caps(self, config: Any) -> Caps:
        """Of a model that ``require_plain`` accepts."""

    def feed_forward_widths(self, config: Any) -> list[int]:
        """Of the feed-forward layers that a token passes in one decoder layer: one width, or that of each expert."""

    def active_elements(self, layer: nn.Module) -> int:
        """Elements of a decoder layer's matrices that a token is multiplied with, of experts only those it uses."""

    def published_name(self, name: str) -> str:
        """The name by which vLLM loads a tensor of the state dict, or of transformers' files."""

    def as_published(self, name: str, value: Tensor) -> Tensor:
        """A tensor of the state dict in the layout of the model's published files, which vLLM loads. May be a view."""


class Experts(Protocol):
    """How the layers of a family choose experts."""

    def routers(self, decoder: Any) -> list[Any]:
        """The modules that choose, in the order of the layers. Each maps [T, H] to logits [T, experts], the weights
        [T, k] of the chosen experts, and the experts [T, k]."""

    def weights(self, router: Any, logits: Tensor, experts: Tensor) -> Tensor:
        """[T, k] the weights that a router gives to ``experts`` [T, k], whether it would choose them or not."""


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentInputs:
    """What a layer with a recurrent state computes of each token alone. Hk key heads of size Dk, Hv value heads of size
    Dv."""

    mixed: Tensor  # [T, 2 Hk Dk + Hv Dv]: query, key and value, before the convolution along the sequence
    gate: Tensor  # [T, Hv Dv], of the output
    write: Tensor  # [T, Hv]: the sigmoid of it is the share of the old value that the new one replaces
    decay: Tensor  # [T, Hv]: the larger, the more of the state is forgotten


class Recurrence(Protocol):
    """Decoder layers with a recurrent state in place of attention: gated delta nets, arXiv:2412.06464."""

    def layers(self, decoder: Any) -> list[Any]:
        """The modules that stand where other layers have attention. ``models.recurrence`` names the parts that it uses
        besides ``inputs``."""

    def state_elements(self, layer: Any) -> int:
        """Elements of a layer's state."""

    def inputs(self, layer: Any, hidden: Tensor) -> RecurrentInputs:
        """Of the tokens of a row [T, H]."""


class Images(Protocol):
    """How a family takes images."""

    @property
    def videos(self) -> Videos | None:
        """The family's own input for videos. None: it has none here, and a video is a list of images."""

    @property
    def processors(self) -> tuple[str, ...]:
        """Class names of the image processors in transformers. Families may share one, with the same ``resizing``."""

    @property
    def placeholders(self) -> tuple[str, ...]:
        """Special tokens that stand for images and videos. The sampler may not generate them."""

    # --- before training: sizes and tokens, without torch ---

    def resizing(self, processor: Any) -> Resizing:
        """The size rule of a loaded processor, which has the ``image_processor``."""

    def layout(self, config: Any) -> ImageLayout:
        """Where a model of this configuration has images among its tokens."""

    def engine_options(self, image_processor: Any, min_pixels: int, max_pixels: int) -> dict[str, Any]:
        """vLLM's ``mm_processor_kwargs``."""

    # --- the vision tower ---

    def read(
        self, image_processor: Any, images: Sequence[Image.Image], min_pixels: int, max_pixels: int
    ) -> tuple[Tensor, list[Grid]]:
        """Pixels as the tower takes them, and the grid of each image."""

    @property
    def takes_tiles(self) -> bool:
        """Whether the tower's input is a batch of tiles of one size, each of which attends to itself alone. Else it is
        one row with the patches of all images, whose bounds ``tower_arguments`` gives."""

    def owns(self, tensor: str) -> bool:
        """Whether a tensor of this name belongs to the vision tower, in memory or in a safetensors file."""

    def tower(self, hf: Any) -> Any:
        """The module that turns patches into features."""

    @property
    def both_ways(self) -> bool:
        """Whether the tokens of an image attend to each other in both directions, as in ``ImageLayout``."""

    @property
    def adapts_tower(self) -> bool:
        """Whether vLLM has adapters for the tower's linear layers."""

    def tower_blocks(self, tower: Any) -> Sequence[nn.Module]:
        """The tower's layers: units of sharding, compilation and activation checkpointing."""

    def tower_arguments(self, config: Any, grids: Tensor) -> dict[str, Any]:
        """Keyword arguments of the tower's forward pass, without the pixels, on the CPU.

        Args:
            config: of the tower, with packed attention set.
            grids: [I, 3] int64 on the CPU.
        """

    def features(self, output: Any) -> Tensor:
        """[R, F] from what the tower's forward pass returns. F is the decoder's width H, or a multiple of it where the
        features enter several decoder layers."""

    def blank(self, config: Any) -> tuple[tuple[int, ...], Grid]:
        """Shape of the pixels of the smallest image, and its grid."""

    def decoder_inputs(self, embeddings: Tensor, features: Tensor, index: Tensor, rows: Tensor) -> dict[str, Any]:
        """Keyword arguments with which features enter the decoder, ``inputs_embeds`` [1, T, H] among them.

        Args:
            index: [M] position in the row of each image token.
            rows: [M] row of ``features`` that it takes.
        """

    # --- transformers' own forward pass, which a merged model is compared with ---

    def plain_arguments(
        self, layout: ImageLayout, token_ids: Tensor, pixels: Tensor, grids: Tensor, images: Sequence[ImageRef] = ()
    ) -> dict[str, Any]:
        """Keyword arguments of transformers' model for one sequence [L], without ``input_ids``.

        Args:
            images: of the grids. Empty: none of them is a video.
        """

    # --- cost ---

    def shape(self, tower: Any, config: Any) -> TowerShape:
        """What the tower computes, for FLOPs.

        Args:
            config: of the tower.
        """

    def intermediate(self, config: Any) -> int:
        """Width of the feed-forward layers of a tower of this configuration."""

    def head_counts_and_widths(self, config: Any) -> list[int]:
        """Of the tower. Tensor parallelism has to divide each of them.

        Args:
            config: of the whole model.
        """


class Videos(Protocol):
    """How a family takes videos in its own input: neighbouring frames share patches."""

    @property
    def processors(self) -> tuple[str, ...]:
        """Class names of the processors in transformers, which hold an image processor and a tokenizer."""

    def token_id(self, processor: Any) -> int:
        """The placeholder that the chat template writes for a video."""

    def expansion(self, processor: Any, video: ImageRef) -> Sequence[int]:
        """Token ids that the processor writes in place of the one placeholder of a video."""

    def read(self, image_processor: Any, frames: Sequence[Image.Image]) -> tuple[Tensor, Grid]:
        """Pixels of resized frames as the tower takes them, and their grid."""

    def engine_options(self, image_options: Mapping[str, Any]) -> dict[str, Any]:
        """vLLM's ``mm_processor_kwargs``, with which it takes videos as they are.

        Args:
            image_options: ``Images.engine_options``.
        """


class Resizing(Protocol):
    """How one image processor resizes."""

    @property
    def factor(self) -> int:
        """Both sides of a resized image are multiples of this number of pixels."""

    def target_size(self, width: int, height: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
        """Width and height that the processor resizes an image of this size to.

        Raises:
            ValueError: the processor refuses an image of this size.
        """

    def expansion(self, width: int, height: int) -> Sequence[int]:
        """Token ids that the processor writes in place of the one placeholder of a resized image: a token for each row
        of its features, and where the family has them markers of tiles, ends and lines."""

    @property
    def joins(self) -> Mapping[tuple[int, int], int]:
        """Pairs of neighbouring tokens that the tokenizer writes as one, in the order in which they are replaced: the
        first or last token of an expansion, and what may stand next to it."""


class ImageLayout(Protocol):
    """Where one model has images among its tokens."""

    @property
    def feature_token_ids(self) -> tuple[int, ...]:
        """The placeholders that stand for one row of features: of an image, and of a video."""

    @property
    def both_ways(self) -> bool:
        """Whether the tokens of an image attend to each other in both directions, in every layer. Its features then
        stand side by side."""

    def num_rows(self, grid: Grid) -> int:
        """Rows of features that an image becomes: its placeholder tokens."""

    def num_inputs(self, grid: Grid) -> int:
        """Rows of pixels that the tower takes of an image."""

    def positions(
        self, token_ids: Ints, grids: Sequence[Grid], images: Sequence[ImageRef] = ()
    ) -> npt.NDArray[np.int64]:
        """[L], or [A, L] for positions of A axes, of one sequence.

        Args:
            images: of the grids. Empty: none of them is a video.

        Raises:
            ValueError: the image tokens do not match the grids.
        """
