"""Enters the namespaces of a host, and forks there what tests/preloaded.py is asked for.

    python inside.py PID ADDRESS

It ends when its stdin does.
"""

from __future__ import annotations

import ctypes
import os
import sys

from tests.preloaded import listen
from tests.preloaded_server import Server


def main() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    # The last changes which /proc is seen. That of processes holds for those forked after it.
    names = ("net", "uts", "ipc", "pid", "mnt")
    opened = [os.open(f"/proc/{sys.argv[1]}/ns/{name}", os.O_RDONLY) for name in names]
    for namespace in opened:
        if libc.setns(namespace, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(namespace)
    if process := os.fork():
        os.waitpid(process, 0)
        return
    listening = listen(sys.argv[2])
    print("ready", flush=True)
    Server(listening).serve()


if __name__ == "__main__":
    main()
