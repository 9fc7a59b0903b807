"""The sequences on which ``check-model`` compares implementations: one of each shape that training meets."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from rlcore.data.pixels import IMAGE_MARKER, VIDEO_MARKER, video_file
from rlcore.data.prompts import PromptBuilder
from rlcore.data.synthetic.geometry import png_bytes
from rlcore.data.table import IMAGES
from rlcore.types import ImageRef, Problem, TrainingSample

MAX_IMAGES = 3  # of one sequence
_COMPLETIONS = (
    "The sum of the angles is 180 degrees, so the last one is 47.\n\\boxed{47}",
    "We count the sides one by one: 1, 2, 3, 4, 5. There are five of them.",
    "42",
)
_SQUARES = 4  # per side of a picture, each of one colour


@dataclass(frozen=True, slots=True)
class CheckInputs:
    """Sequences with completions, and what each of them tries."""

    samples: tuple[TrainingSample, ...]
    kinds: tuple[str, ...]  # one for each sample

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(sample.num_tokens for sample in self.samples)


def write_check_inputs(prompts: PromptBuilder, folder: Path) -> CheckInputs:
    """A text, a group of three that shares its prompt, and for a model with images: one picture, two pictures of
    different sizes, and a video, which is a list of frames. The group has the one picture. If videos are the model's
    own input, there are also a picture with a video of five frames, and a group that shares a video of eight seconds.

    Args:
        folder: of the image store that the pictures are written to.

    Raises:
        Unusable: the pictures have no size within data.min_pixels and data.max_pixels.
    """
    text = [Problem("text", "How many sides does a pentagon have, and what is 23 + 19?", (), "", "check")]
    if prompts.placeholders.image_token_id is None:
        shared = Problem("shared prompt", "What is the last angle of this triangle?", (), "", "check")
    else:
        wide, high = (_picture(prompts, folder, seed, size) for seed, size in enumerate([(224, 140), (112, 196)]))
        frames = tuple(_picture(prompts, folder, 2 + frame, (140, 140)) for frame in range(MAX_IMAGES))
        shared = Problem("one picture, shared prompt", f"{IMAGE_MARKER}What is this?", (wide,), "", "check")
        text += [
            Problem("two pictures", f"Compare {IMAGE_MARKER} with {IMAGE_MARKER}.", (wide, high), "", "check"),
            Problem("a video", f"{IMAGE_MARKER * len(frames)}What moves?", frames, "", "check"),
        ]
    problems = [(problem, _COMPLETIONS[index % 2]) for index, problem in enumerate(text)]
    problems += [(shared, completion) for completion in _COMPLETIONS]
    if prompts.placeholders.video_token_id is not None:
        odd = _video(prompts, folder, [20, 21, 22, 23, 24], 0.25)
        slow = _video(prompts, folder, [30, 31, 32, 33], 2.0)
        mixed = Problem("a picture and a video", f"{IMAGE_MARKER} or {VIDEO_MARKER}?", (wide, odd), "", "check")
        shared = Problem("one video, shared prompt", f"{VIDEO_MARKER}What moves?", (slow,), "", "check")
        problems += [(mixed, _COMPLETIONS[0]), *((shared, completion) for completion in _COMPLETIONS)]
    return CheckInputs(
        tuple(_sample(prompts, problem, completion) for problem, completion in problems),
        tuple(problem.problem_id for problem, _ in problems),
    )


def _sample(prompts: PromptBuilder, problem: Problem, completion: str) -> TrainingSample:
    prompt = prompts.tokens(problem)
    answer = np.asarray(prompts.tokenizer.encode(completion, add_special_tokens=False), np.int32)
    mask = np.arange(len(prompt) + len(answer)) >= len(prompt)
    return TrainingSample(
        token_ids=np.concatenate([prompt, answer]),
        loss_mask=mask,
        sampler_logprobs=np.zeros(len(mask), np.float32),
        images=problem.images,
        policy_version=0,
    )


def _picture(prompts: PromptBuilder, folder: Path, seed: int, size: tuple[int, int]) -> ImageRef:
    """Write squares of random colours as a picture of this shape, in the size that the model's processor takes."""
    drawn = _squares(seed, prompts.target_size(*size))
    return ImageRef(_store(folder, png_bytes(drawn)), *drawn.size)


def _video(prompts: PromptBuilder, folder: Path, seeds: Sequence[int], seconds_per_frame: float) -> ImageRef:
    """As ``_picture``, of frames that have nothing in common."""
    frames = [_squares(seed, prompts.target_size(196, 140)) for seed in seeds]
    name = _store(folder, video_file(frames, seconds_per_frame))
    return ImageRef(name, *frames[0].size, frames=len(frames), seconds_per_frame=seconds_per_frame)


def _squares(seed: int, size: tuple[int, int]) -> Image.Image:
    colours = np.random.default_rng(seed).integers(0, 256, (_SQUARES, _SQUARES, 3)).astype(np.uint8)
    return Image.fromarray(colours).resize(size, Image.Resampling.NEAREST)


def _store(folder: Path, data: bytes) -> str:
    name = hashlib.sha256(data).hexdigest()
    (folder / IMAGES).mkdir(parents=True, exist_ok=True)
    (folder / IMAGES / f"{name}.png").write_bytes(data)
    return name
