"""Synthetic geometry problems, drawn with Pillow, in geometry3k's schema: small enough for CPU experiments.

Every question is two words; the numbers are only in the picture. A hash of its pixels decides the split of a picture,
so that no picture appears in two splits, whatever the seeds are.

Two things are easier than in a textbook, so that a model of a million parameters learns to read in a minute: each
label fills a cell of 14 pixels (one patch of the policy's vision tower), and figures are not to scale.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from random import Random

from PIL import Image, ImageDraw, ImageFont

from rlcore.data import synthetic
from rlcore.data.synthetic import Split

CELL = 14  # pixels of a patch; picture sides are multiples of two cells
_SUPERSAMPLE = 4  # lines are drawn four times larger and averaged, which smooths their edges
_PEN = 7  # width of lines, in supersampled pixels
_FONT_SIZE = 13  # two digits fill one cell


@dataclass(frozen=True, slots=True)
class SyntheticProblem:
    """``answer`` follows from the question and ``numbers``, which only the picture shows."""

    question: str  # without the image marker
    numbers: tuple[int, ...]
    reasoning: str  # a correct thought, for the supervised warm start
    answer: str
    picture: Image.Image
    problem_id: str = ""
    kind: str = ""


Point = tuple[float, float]  # x to the right, y down, in pixels
Cell = tuple[int, int]  # column, row
Label = tuple[Cell, str]


def draw_problem(split: Split, index: int, seed: int) -> SyntheticProblem:
    """Problem ``index`` of a split; the same arguments always give the same picture and text.

    The kinds alternate with the index. Pictures are drawn until one belongs to ``split``: four tries on average.
    """
    kind = list(KINDS)[index % len(KINDS)]
    random = Random(f"{seed}/{split}/{index}")
    while True:
        problem = KINDS[kind](random)
        if split_of(problem.picture) == split:
            return replace(problem, problem_id=f"synthetic-{split}-{seed}-{index}", kind=kind)


def split_of(picture: Image.Image) -> Split:
    """The only split in which this picture may appear, by a hash of its size and pixels."""
    return synthetic.split_of(f"{picture.width}x{picture.height}:".encode() + picture.tobytes())


def png_bytes(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, format="PNG")
    return file.getvalue()


def _polygon(random: Random) -> SyntheticProblem:
    """Count the sides of a regular polygon, turned, scaled and moved at random."""
    sides = random.randint(3, 5)
    size = 4 * CELL
    radius = random.uniform(21, 25)
    spare = size / 2 - radius - 2
    x, y = (size / 2 + random.uniform(-spare, spare) for _ in range(2))
    turn = random.uniform(0, 2 * math.pi)
    angles = [turn + 2 * math.pi * k / sides for k in range(sides)]
    corners = [(x + radius * math.cos(angle), y + radius * math.sin(angle)) for angle in angles]
    picture = _draw((size, size), [[*corners, corners[0]]], [])
    return SyntheticProblem("Sides?", (sides,), f"{sides} sides", str(sides), picture)


def _triangle(random: Random) -> SyntheticProblem:
    """Two angles of a triangle are given; x is the third."""
    first, second = (10 * random.randint(4, 7) for _ in range(2))
    corners = [
        (_near(random, 7), _near(random, 75)),
        (_near(random, 77), _near(random, 75)),
        (_near(random, 42, 12), _near(random, 8)),
    ]
    cells = [(1, 4), (4, 4), (int(corners[2][0] // CELL), 2)]
    names = [str(first), str(second), "x"]
    if random.random() < 0.5:
        names = [names[0], names[2], names[1]]
    picture = _draw((6 * CELL, 6 * CELL), [[*corners, corners[0]]], list(zip(cells, names, strict=True)))
    return SyntheticProblem("Angle x?", (first, second), f"180-{first}-{second}", str(180 - first - second), picture)


def _straight_line(random: Random) -> SyntheticProblem:
    """A ray starts on a straight line; one angle is given, x is the other."""
    angle = 10 * random.randint(2, 9)
    foot = (_near(random, 42, 6), 49.0 + random.uniform(-3, 2))
    tilt = random.uniform(-0.5, 0.5)
    tip = (foot[0] + 35 * math.sin(tilt), foot[1] - 40 * math.cos(tilt))
    names = [str(angle), "x"] if random.random() < 0.5 else ["x", str(angle)]
    labels = list(zip([(1, 2), (4, 2)], names, strict=True))
    line = [(2.0, foot[1]), (82.0, foot[1])]
    picture = _draw((6 * CELL, 4 * CELL), [line, [foot, tip]], labels)
    return SyntheticProblem("Angle x?", (angle,), f"180-{angle}", str(180 - angle), picture)


def _segment(random: Random) -> SyntheticProblem:
    """The lengths of the two parts of a segment are given; the question asks for the sum."""
    first, second = (random.randint(2, 8) for _ in range(2))
    ends = [_near(random, 7), _near(random, 42, 6), _near(random, 77)]
    height, slope = _near(random, 42), random.uniform(-0.1, 0.1)
    points = [(x, height + slope * (x - 42)) for x in ends]
    ticks = [[(x, y - 5), (x, y + 5)] for x, y in points]
    labels = [((1, 1), str(first)), ((4, 1), str(second))]
    picture = _draw((6 * CELL, 4 * CELL), [points, *ticks], labels)
    return SyntheticProblem("Length?", (first, second), f"{first}+{second}", str(first + second), picture)


KINDS: dict[str, Callable[[Random], SyntheticProblem]] = {
    "polygon": _polygon,
    "triangle": _triangle,
    "straight-line": _straight_line,
    "segment": _segment,
}


def _near(random: Random, value: float, spread: float = 4) -> float:
    return value + random.uniform(-spread, spread)


def _draw(size: tuple[int, int], lines: list[list[Point]], labels: list[Label]) -> Image.Image:
    """White paper, black lines, red labels on white cells."""
    width, height = size
    big = Image.new("RGB", (width * _SUPERSAMPLE, height * _SUPERSAMPLE), "white")
    pen = ImageDraw.Draw(big)
    for line in lines:
        points = [(x * _SUPERSAMPLE, y * _SUPERSAMPLE) for x, y in line]
        pen.line(points, fill="black", width=_PEN, joint="curve")
    picture = big.reduce(_SUPERSAMPLE)
    paper = ImageDraw.Draw(picture)
    for (column, row), text in labels:
        x, y = column * CELL, row * CELL
        paper.rectangle([x, y, x + CELL - 1, y + CELL - 1], fill="white")
        paper.text((x + CELL / 2, y + CELL / 2), text, fill=(200, 0, 0), font=_font(), anchor="mm")
    return picture


@cache
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size=_FONT_SIZE)
