"""``python launch.py PARENT FD COMMAND...``: become COMMAND, with a SIGTERM when the parent ends, even by SIGKILL.

A program of its own and no ``preexec_fn``: that runs between fork and exec, where a lock that another thread of the
parent held at the fork is never released. What goes wrong is written to FD as an errno; FD closes when COMMAND runs.
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
    if os.getppid() != parent:  # it ended before the line above
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
