"""Pictures and questions in a terminal, for ``rlflow chat``."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import typer
from PIL import Image

from tasks.chat import half_blocks

_MOST_COLUMNS = 80


def show(path: Path, image: Image.Image) -> None:
    """The picture, or only its size where the output is no terminal."""
    typer.echo(f"{path.name}, {image.width} x {image.height}", err=True)
    if sys.stdout.isatty():
        size = shutil.get_terminal_size()
        typer.echo(half_blocks(image, min(size.columns, _MOST_COLUMNS), max(1, size.lines - 6)))


def ask() -> Iterator[str]:
    """What a person types, up to an empty line or the end of the input."""
    while True:
        if sys.stdin.isatty():
            typer.echo("> ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line.strip():
            return
        yield line.rstrip("\n")
