"""Whether the kernel has killed processes for memory: the one trace that such a kill leaves. No torch."""

from __future__ import annotations

from pathlib import Path

# This control group's own count where it has one (version 2, version 1), else the machine's.
_COUNTERS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control", "/proc/vmstat")


def oom_kills(counters: tuple[str, ...] = _COUNTERS) -> int:
    """Kills so far: compare two counts. 0 where the kernel does not say."""
    for path in counters:
        if not Path(path).exists():
            continue
        for line in Path(path).read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0
