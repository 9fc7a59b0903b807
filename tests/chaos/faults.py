"""Faults of the disk: full, read-only, and checkpoints damaged in five ways."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path


def truncate(checkpoint: Path) -> None:
    file = _largest(checkpoint)
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(checkpoint: Path) -> None:
    file = _largest(checkpoint)
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))


def remove_a_file(checkpoint: Path) -> None:
    _largest(checkpoint).unlink()


def damage_the_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_text('{"run_id": "cha')


def half_upload(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()
    _largest(checkpoint).unlink()


DAMAGES: tuple[tuple[str, Callable[[Path], None]], ...] = (
    ("truncated file", truncate),
    ("flipped bit", flip_a_bit),
    ("missing file", remove_a_file),
    ("damaged manifest", damage_the_manifest),
    ("half uploaded", half_upload),
)


class SmallDisk:
    """A disk of its own for the run's checkpoints, to be filled and made read-only. Needs root, who may mount."""

    def __init__(self, folder: Path, size: str) -> None:
        self._folder = folder
        folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        self.refused = answer.stderr.strip() or f"mount ended with {answer.returncode}" if answer.returncode else ""

    def fill(self) -> None:
        with contextlib.suppress(OSError), (self._folder / ".ballast").open("wb") as file:
            while True:
                file.write(bytes(2**16))
                file.flush()

    def empty(self) -> None:
        (self._folder / ".ballast").unlink()

    def set_writable(self, writable: bool) -> None:
        options = f"remount,{'rw' if writable else 'ro'}"
        subprocess.run(["mount", "-o", options, str(self._folder)], check=True)

    def close(self) -> None:
        if not self.refused:
            subprocess.run(["umount", "--lazy", str(self._folder)], check=True)


def _largest(checkpoint: Path) -> Path:
    return max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
