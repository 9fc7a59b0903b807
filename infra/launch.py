"""``python launch.py PARENT FD COMMAND...``: become COMMAND, which gets SIGTERM when the parent ends, even by SIGKILL.

A separate program instead of ``preexec_fn``, which can deadlock on a lock that another thread of the parent held during
the fork. On failure the errno is written to FD. FD closes when COMMAND runs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, answer, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent ended before prctl
        sys.exit(1)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and COMMAND would inherit that
        signal.signal(number, signal.SIG_DFL)
    os.set_inheritable(answer, False)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(answer, str(error.errno).encode())


if __name__ == "__main__":
    main()
