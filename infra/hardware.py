"""What this machine is made of."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Hardware:
    cores: int  # that this process may use
    memory_gib: float
    gpus: tuple[str, ...]  # one name per device

    def __str__(self) -> str:
        gpus = f"{len(self.gpus)} x {self.gpus[0]}" if self.gpus else "no GPU"
        return f"{self.cores} cores, {self.memory_gib:.0f} GiB memory, {gpus}"


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe() -> Hardware:
    return Hardware(cores=usable_cores(), memory_gib=psutil.virtual_memory().total / 2**30, gpus=tuple(_gpu_names()))


def _gpu_names() -> list[str]:
    """Asked of the driver's own tool, because this process never opens a GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    answer = subprocess.run(
        [tool, "--query-gpu=name", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()] if answer.returncode == 0 else []
