"""How busy this machine is: CPU, memory, disk and GPUs. Opens no GPU: nvidia-smi tells."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

_MIB = 2**20
_SMI_SECONDS = 5.0
_FIELDS = "index,name,utilization.gpu,memory.used,memory.total"


@dataclass(frozen=True, slots=True)
class GpuLoad:
    index: int
    name: str
    busy: float | None  # share of the time with a kernel at work; None: the GPU does not tell
    memory_used: int  # bytes
    memory_total: int


@dataclass(frozen=True, slots=True)
class MachineLoad:
    cpu: float  # share of all cores since the last call in this process
    memory_used: int  # bytes
    memory_total: int
    disk_free: int  # of the file system of the data folder
    gpus: tuple[GpuLoad, ...]


def machine_load(data_dir: Path) -> MachineLoad:
    """The load now. The first call in a process measures the CPU for a tenth of a second."""
    memory = psutil.virtual_memory()
    return MachineLoad(
        cpu=_cpu(),
        memory_used=memory.total - memory.available,
        memory_total=memory.total,
        disk_free=shutil.disk_usage(data_dir).free,
        gpus=_gpus(),
    )


_measured = False


def _cpu() -> float:
    global _measured
    first, _measured = not _measured, True
    return float(psutil.cpu_percent(0.1 if first else None)) / 100


def _gpus() -> tuple[GpuLoad, ...]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    try:
        answer = subprocess.run(
            [tool, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=_SMI_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parse_gpus(answer.stdout) if answer.returncode == 0 else ()


def parse_gpus(text: str) -> tuple[GpuLoad, ...]:
    """GPUs from nvidia-smi's table. One that does not tell its memory, such as a part of a GPU, has 0 bytes."""
    return tuple(_gpu(line.split(", ")) for line in text.splitlines() if line.count(", ") == _FIELDS.count(","))


def _gpu(cells: list[str]) -> GpuLoad:
    index, name, busy, used, total = (cell.strip() for cell in cells)
    share = int(busy) / 100 if busy.isdigit() else None
    return GpuLoad(int(index), name, share, *(int(cell) * _MIB if cell.isdigit() else 0 for cell in (used, total)))
