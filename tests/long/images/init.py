"""Stands for docker-init: starts a command, hands signals on to it and reaps what others have left."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    handed_on = {signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
    signal.pthread_sigmask(signal.SIG_BLOCK, {*handed_on, signal.SIGCHLD})
    command = os.fork()
    if command == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execvp(sys.argv[1], sys.argv[1:])
    while True:
        number = signal.sigwait({*handed_on, signal.SIGCHLD})
        if number != signal.SIGCHLD:
            os.kill(command, number)
            continue
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == command:
                os._exit(os.waitstatus_to_exitcode(status) % 256)
            if pid == 0:
                break


if __name__ == "__main__":
    main()
