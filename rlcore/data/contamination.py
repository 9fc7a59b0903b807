"""Problems of an evaluation that training has too: exact and near duplicates of texts and images. No torch.

Texts are compared by the Jaccard index of their word 5-grams, at least 0.8 for near duplicates. "Deduplicating training
data makes language models better" (arXiv:2107.06499) compares the same 5-grams, there estimated by MinHash.

Images are compared by a perceptual hash of 256 bits: the cosine transform of Zauner, "Implementation and benchmarking
of perceptual image hash functions" (2010), on a larger grid. Near duplicates differ in at most 52 bits, other images in
about half. Between the training and validation splits of Geometry3K five figures are that near without having the same
pixels: three are drawn again, one has other letters, and one another number. With 64 bits and a limit of 8, eight are
near: it finds two more that are drawn again, and two other figures.

Drawn problems of one kind have the same words and figures that differ in a number, so most of them are near to each
other and none of that is contamination. Only exact duplicates are looked for where both datasets are drawn.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from rlcore.data.pixels import MARKERS, ImageStore
from rlcore.data.synthetic.sources import SYNTHETIC_SOURCES
from rlcore.data.table import load_problems
from rlcore.types import ImageRef, Problem

NEAR_TEXT = 0.8  # Jaccard index
NEAR_IMAGE = 52  # different bits of HASH_BITS
HASH_BITS = 256

Kind = Literal["exact", "near", "same_images"]
KINDS: Mapping[Kind, str] = {
    "exact": "same text, same images",
    "near": "similar text, similar images",
    "same_images": "similar images, another text",
}

_SHINGLE = 5  # words
_SIDE, _FREQUENCIES = 64, 16  # pixels that an image is reduced to; lowest frequencies kept of each axis
_WORD = re.compile(r"\w+|[^\w\s]")
_COSINES = np.cos(np.pi * np.outer(np.arange(_FREQUENCIES), 2 * np.arange(_SIDE) + 1) / (2 * _SIDE))
_ORDER = list(KINDS)

Bits = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class ImagePrint:
    """What an image is compared by."""

    pixels: str  # hash of its size and RGB values
    bits: Bits  # [4], the perceptual hash


@dataclass(frozen=True, eq=False)
class ProblemPrint:
    """What a problem is compared by."""

    problem_id: str
    words: tuple[str, ...]
    images: tuple[ImagePrint, ...]

    @cached_property
    def shingles(self) -> frozenset[tuple[str, ...]]:
        """The word 5-grams; of a shorter text the whole text."""
        last = max(1, len(self.words) - _SHINGLE + 1)
        return frozenset(self.words[start : start + _SHINGLE] for start in range(last))


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A problem of the evaluation and the training problem that is most like it."""

    evaluation_id: str
    training_id: str
    kind: Kind
    similarity: float  # Jaccard index of the texts
    bits: int  # different bits of the images, of the pair that differs most; 0 without images


def text_words(problem: Problem) -> tuple[str, ...]:
    """The words and symbols of a problem's text, in lower case, without image markers and spaces."""
    return tuple(_WORD.findall(MARKERS.sub(" ", problem.conversation).lower()))


def image_print(image: Image.Image) -> ImagePrint:
    """The hashes of an RGB image.

    The perceptual hash: reduce to 64 x 64 grey values, take the 16 x 16 lowest frequencies of the cosine transform, and
    set a bit where the coefficient exceeds the median. The bit of the mean brightness is always 0.
    """
    pixels = hashlib.sha256(f"{image.size}".encode() + image.tobytes()).hexdigest()
    grey = np.asarray(image.convert("L").resize((_SIDE, _SIDE), Image.Resampling.LANCZOS), np.float64)
    frequencies = (_COSINES @ grey @ _COSINES.T).flatten()
    above = frequencies > np.median(frequencies[1:])
    above[0] = False
    return ImagePrint(pixels, np.packbits(above).view(np.uint64))


def different_bits(one: Bits, other: Bits) -> npt.NDArray[np.int64]:
    """The number of different bits of hashes [..., 4]."""
    counts: npt.NDArray[np.int64] = np.bitwise_count(one ^ other).sum(-1, dtype=np.int64)
    return counts


def load_prints(dataset: Path, threads: int = 1) -> list[ProblemPrint]:
    """The problems of a prepared and resized dataset.

    Raises:
        StorageError: the folder is no prepared dataset, or an image is missing or damaged.
    """
    problems, store = load_problems(dataset), ImageStore(dataset, kept_bytes=0)
    refs = list({image: None for problem in problems for image in problem.images})
    with ThreadPoolExecutor(threads) as pool:
        prints = dict(zip(refs, pool.map(lambda ref: image_print(store.read(ref)), refs), strict=True))
    return [problem_print(problem, prints.__getitem__) for problem in problems]


def problem_print(problem: Problem, of_image: Callable[[ImageRef], ImagePrint]) -> ProblemPrint:
    return ProblemPrint(problem.problem_id, text_words(problem), tuple(of_image(image) for image in problem.images))


def find_duplicates(training: Sequence[ProblemPrint], evaluation: Iterable[ProblemPrint]) -> list[Duplicate]:
    """For each problem of the evaluation that training has too, the training problem that is most like it.

    A problem with images is compared with those training problems that have a near image for each of its images. Its
    text then decides the kind. A problem without images is compared with the training problems without images.
    """
    with_text, with_image = _TextIndex(training), _ImageIndex(training)
    found = []
    for problem in evaluation:
        near = with_image.near(problem) if problem.images else dict.fromkeys(with_text.sharing(problem), 0)
        pairs = [pair for index, bits in near.items() if (pair := _compare(problem, training[index], bits))]
        if pairs:
            found.append(min(pairs, key=_likeness))
    return found


def _compare(problem: ProblemPrint, other: ProblemPrint, bits: int) -> Duplicate | None:
    common = len(problem.shingles & other.shingles)
    similarity = common / (len(problem.shingles) + len(other.shingles) - common)
    kind: Kind
    same_pixels = [image.pixels for image in problem.images] == [image.pixels for image in other.images]
    if problem.words == other.words and same_pixels:
        kind = "exact"
    elif similarity >= NEAR_TEXT and len(problem.images) == len(other.images):
        kind = "near"
    elif problem.images:
        kind = "same_images"
    else:
        return None
    return Duplicate(problem.problem_id, other.problem_id, kind, similarity, bits)


class _TextIndex:
    """Training problems without images by their shingles."""

    def __init__(self, training: Sequence[ProblemPrint]) -> None:
        self._training = training
        self._holders: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
        for index, problem in enumerate(training):
            if not problem.images:
                for shingle in problem.shingles:
                    self._holders[shingle].append(index)

    def sharing(self, problem: ProblemPrint) -> Iterator[int]:
        """Indices of the training problems that share enough shingles for a near duplicate, in ascending order."""
        common = Counter(index for shingle in problem.shingles for index in self._holders.get(shingle, ()))
        own = len(problem.shingles)
        for index in sorted(common):
            shared = common[index]
            if shared >= NEAR_TEXT * (own + len(self._training[index].shingles) - shared):
                yield index


class _ImageIndex:
    """The images of all training problems."""

    def __init__(self, training: Sequence[ProblemPrint]) -> None:
        images = [(index, image) for index, problem in enumerate(training) for image in problem.images]
        self._owners = np.array([index for index, _ in images], np.int64)
        self._bits = np.array([image.bits for _, image in images], np.uint64).reshape(-1, HASH_BITS // 64)

    def near(self, problem: ProblemPrint) -> dict[int, int]:
        """Indices of the training problems that have a near image for each image of ``problem``, and the different bits
        of the image that differs most."""
        common: dict[int, int] | None = None
        for image in problem.images:
            distances = different_bits(self._bits, image.bits)
            best: dict[int, int] = {}
            for place in np.flatnonzero(distances <= NEAR_IMAGE):
                owner, bits = int(self._owners[place]), int(distances[place])
                best[owner] = min(bits, best.get(owner, bits))
            if common is None:
                common = best
            else:
                common = {index: max(bits, best[index]) for index, bits in common.items() if index in best}
        return common or {}


@dataclass(frozen=True, slots=True)
class Contamination:
    """What an evaluation and its training data have in common."""

    problems: int  # of the evaluation
    duplicates: Sequence[Duplicate]
    exact_only: bool  # all problems are drawn, and near duplicates were not looked for


def compare_datasets(train: Path, evaluation: Path, threads: int = 1) -> Contamination:
    """The duplicates between two prepared datasets with resized images.

    Raises:
        StorageError: a folder is no prepared dataset, or an image is missing or damaged.
    """
    training, problems = load_problems(train), load_problems(evaluation)
    if all(is_drawn(problem) for problem in (*training, *problems)):
        return Contamination(len(problems), find_exact(training, problems), exact_only=True)
    prints = load_prints(evaluation, threads)
    return Contamination(len(prints), find_duplicates(load_prints(train, threads), prints), exact_only=False)


def is_drawn(problem: Problem) -> bool:
    """Whether the problem is of a synthetic source."""
    return problem.source.partition("@")[0] in SYNTHETIC_SOURCES


def find_exact(training: Iterable[Problem], evaluation: Iterable[Problem]) -> list[Duplicate]:
    """The exact duplicates of drawn problems. Their pixels are the same if their files are, so none is decoded."""
    known: dict[tuple[tuple[str, ...], tuple[str, ...]], str] = {}
    for problem in training:
        known.setdefault(_content(problem), problem.problem_id)
    return [
        Duplicate(problem.problem_id, known[content], "exact", 1.0, 0)
        for problem in evaluation
        if (content := _content(problem)) in known
    ]


def _content(problem: Problem) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return text_words(problem), tuple(image.sha256 for image in problem.images)


def as_lines(found: Iterable[Duplicate]) -> str:
    """One JSON object a line for each pair."""
    return "".join(json.dumps(asdict(pair)) + "\n" for pair in found)


def read_pairs(path: Path) -> list[Duplicate]:
    """The pairs of a file that has ``as_lines``."""
    return [Duplicate(**json.loads(line)) for line in path.read_text().splitlines()]


def most_alike(found: Iterable[Duplicate], number: int) -> list[Duplicate]:
    """The first ``number`` pairs: exact ones, then near ones, then those with the same images; the most similar texts
    first, then the most similar images."""
    return sorted(found, key=_likeness)[:number]


def _likeness(pair: Duplicate) -> tuple[int, float, int]:
    return _ORDER.index(pair.kind), -pair.similarity, pair.bits


def summary(found: Sequence[Duplicate], problems: int) -> str:
    """A Markdown table: number and share of the evaluation's problems by kind.

    Args:
        problems: of the evaluation.
    """
    counts = Counter(pair.kind for pair in found)
    rows = [(f"{kind}: {text}", counts[kind]) for kind, text in KINDS.items()]
    rows += [("any of these", len(found)), ("clean", problems - len(found))]
    lines = [f"| {name} | {count} | {count / max(1, problems):.1%} |\n" for name, count in rows]
    return "| problems of the evaluation | number | share |\n| --- | --- | --- |\n" + "".join(lines)
