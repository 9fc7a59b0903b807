"""What a run may leave behind: processes, temporary folders, Ray sessions, shared memory, half-written files."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from infra import processes

_HALF_WRITTEN = (".staging-", ".sending-", ".trash-")
_HALF_WRITTEN_ENDS = (".tmp", ".new")
_LOOK_SECONDS = 1.0


def left_of(*words: str) -> list[psutil.Process]:
    """Live processes with one of ``words`` (a mark, a folder) in their environment, their command line or the path of
    an open file. This process and its ancestors are not listed.

    Open files, because Ray writes a worker's title over its command line and its environment. What still says whose
    worker it is are its logs, which lie in a folder with the mark in its name.
    """
    pattern = re.compile(b"|".join(re.escape(word.encode()) + rb"(?![\w.-])" for word in words))
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    return [process for process in psutil.process_iter() if process.pid not in own and _is_named(process.pid, pattern)]


def still_running(*words: str) -> list[str]:
    """The command lines of ``left_of``, for a message."""
    return [f"{process.pid} {command_of(process)}" for process in left_of(*words)]


def _is_named(pid: int, pattern: re.Pattern[bytes]) -> bool:
    folder = Path("/proc") / str(pid)
    with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
        texts = [(folder / "environ").read_bytes(), (folder / "cmdline").read_bytes()]
        if any(map(pattern.search, texts)):
            return True
        for descriptor in (folder / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if pattern.search(os.fsencode(os.readlink(descriptor))):
                    return True
    return False


def command_of(process: psutil.Process) -> str:
    """Empty for a process that has ended, zombies included."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def half_written(folder: Path) -> list[Path]:
    """Files and folders below ``folder`` that were written aside and never got their name."""
    return sorted(
        path for path in folder.rglob(".*") if path.name.startswith(_HALF_WRITTEN) or path.suffix in _HALF_WRITTEN_ENDS
    )


class Traces:
    """What the processes of a run use outside its folder. Look while they run: afterwards nothing says whose it was."""

    def __init__(self, *words: str) -> None:
        """
        Args:
            words: what each of the processes carries, as for ``left_of``.
        """
        self._words = set(words)
        self._marks: set[str] = set()
        self._pids: set[int] = set()
        self._shared: set[Path] = set()
        self._sessions_before = set(_ray_sessions())

    def look(self) -> None:
        for process in self.processes():
            self._pids.add(process.pid)
            with contextlib.suppress(OSError, psutil.Error):
                if mark := process.environ().get(processes.MARK):
                    self._marks.add(mark)
                maps = Path(f"/proc/{process.pid}/maps").read_text(errors="replace")
                self._shared |= {Path(path) for path in re.findall(r" (/dev/shm/\S+)$", maps, re.MULTILINE)}

    @contextmanager
    def watched(self) -> Iterator[Traces]:
        """Look every second until the end of the block."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(_LOOK_SECONDS):
                self.look()

        thread = threading.Thread(target=watch, name="traces", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            ended.set()
            thread.join()

    def processes(self) -> list[psutil.Process]:
        """Those that live, found by the words and by every mark that they were seen to carry."""
        return left_of(*self._words, *self._marks)

    def files(self) -> list[Path]:
        """Temporary folders, Ray sessions and shared memory of processes that were seen, and that are still there."""
        temporary = [processes.temporary_folder(mark) for mark in self._marks]
        sessions = [
            path
            for path in _ray_sessions()
            if path not in self._sessions_before and path.name.rpartition("_")[2] in map(str, self._pids)
        ]
        return sorted(path for path in (*temporary, *sessions, *self._shared) if path.exists())


def _ray_sessions() -> list[Path]:
    """Their names end in the pid of the process that started Ray, which a later process may have again."""
    return list((Path(tempfile.gettempdir()) / "ray").glob("session_*_*"))
