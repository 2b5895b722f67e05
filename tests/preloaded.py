"""Python scripts as processes of their own, that start with torch and megatron-core imported.

Importing them takes a process five seconds of a core, a tiny training one. A server imports them
once (preloaded_server.py). Each process is a fork of it, with its own arguments, environment and
open files. It does what `python SCRIPT`, `python -m MODULE` and `python -c CODE` would. Where
importing starts threads, as a GPU's libraries do, a process cannot be forked, and is started as any
other.

A launcher's processes start so as well where PYTHON_EXEC names this file (see `as_interpreter`),
and so does whatever such a process starts as `sys.executable` or spawns with `multiprocessing`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SERVER = ROOT / "tests" / "preloaded_server.py"
ADDRESS = "PRELOADED_SERVER"
"""The variable that says where the server listens."""
LARGEST_REQUEST = 1 << 20
STDIN = 0
INTERPRETER = sys.executable
IGNORED = ("-u", "-B")
"""Flags of the interpreter that are as good as given."""
FORWARDED = tuple(
    getattr(signal, f"SIG{name}") for name in ("TERM", "INT", "QUIT", "USR1", "USR2", "HUP")
)
KEEPS_MEMORY = {f"MALLOC_{name}_": str(1 << 30) for name in ("MMAP_THRESHOLD", "TRIM_THRESHOLD")}
"""For the C library: the pages of a freed tensor are not given back, only for the next to fault
them in anew, a tenth of the CPU time of a tiny run."""
FORKS_ITSELF = "HETERO_TEST_FORKS_ITSELF"
"""Set where importing takes so long that processes are forks of the test session's own."""


class Process:
    """A process that the server has forked; as much of `subprocess.Popen` as the tests need.

    It is killed when this object's connection to the server is closed.
    """

    def __init__(self, connection: socket.socket, pid: int, stdout: int, stderr: int) -> None:
        self._connection = connection
        self.pid = pid
        self.stdout = os.fdopen(stdout, errors="replace")
        self.stderr = os.fdopen(stderr, errors="replace")
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout=0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired("a preloaded process", timeout or 0)
            self.returncode = _receive_number(self._connection)
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read both streams to their ends, then wait for the process."""
        deadline = None if timeout is None else time.monotonic() + timeout
        read: dict[object, list[bytes]] = {self.stdout: [], self.stderr: []}
        with selectors.DefaultSelector() as selector:
            for stream in (self.stdout, self.stderr):
                selector.register(stream, selectors.EVENT_READ)
            while selector.get_map():
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                ready = selector.select(left)
                if not ready:
                    raise subprocess.TimeoutExpired("a preloaded process", timeout or 0)
                for key, _ in ready:
                    some = os.read(key.fd, 1 << 16)
                    read[key.fileobj].append(some)
                    if not some:
                        selector.unregister(key.fileobj)
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        out, err = (b"".join(parts).decode(errors="replace") for parts in read.values())
        self.stdout.close()
        self.stderr.close()
        return out, err


Started = Process | subprocess.Popen[str]


def start(script: Path, words: Sequence[str], *, environ: Mapping[str, str]) -> Started:
    """Start `python script *words` with exactly this environment and both streams piped."""
    (out, its_out), (err, its_err) = os.pipe(), os.pipe()
    words = [str(script), *words]
    try:
        asked = _ask(address(), words, environ, {0: STDIN, 1: its_out, 2: its_err})
    finally:
        os.close(its_out)
        os.close(its_err)
    if asked is not None:
        return Process(*asked, out, err)
    os.close(out)
    os.close(err)
    return subprocess.Popen(
        [INTERPRETER, *words],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _ask(
    server: str, argv: Sequence[str], environ: Mapping[str, str], files: Mapping[int, int]
) -> tuple[socket.socket, int] | None:
    """A connection and the process's number; None if it has to be started without the server.

    `files` are the open files that the process is to have, by the numbers that they have there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST_REQUEST)
    connection.connect(f"\0{server}")
    request = {"argv": [*argv], "environ": {**environ}, "cwd": os.getcwd(), "files": [*files]}
    socket.send_fds(connection, [json.dumps(request).encode()], [*files.values()])
    pid = _receive_number(connection)
    return (connection, pid) if pid else None


def _receive_number(connection: socket.socket) -> int:
    return int(connection.recv(64) or b"1")


def as_interpreter(folder: Path) -> dict[str, str]:
    """What to add to a launcher's environment for its processes to start so; writes a program."""
    program = folder / "python"
    if not program.exists():
        program.write_text(f'#!/bin/sh\nexec {INTERPRETER} -SE {__file__} "$@"\n')
        program.chmod(0o755)
    return {"PYTHON_EXEC": str(program), ADDRESS: address(), "OMP_NUM_THREADS": "1"}


def _stand_in(words: Sequence[str]) -> int:
    """Be a process of the server's to whoever started this one, with its streams and signals."""
    argv = [*itertools.dropwhile(IGNORED.__contains__, words)]
    asked, files = None, _open_files()
    # What comes before this one knows whom to pass it on to waits until it does.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    if argv[0] in ("-m", "-c") or not argv[0].startswith("-"):
        asked = _ask(os.environ[ADDRESS], argv, os.environ, {n: n for n in files})
    if asked is None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execv(sys.executable, [sys.executable, *words])
    connection, pid = asked
    for number in files:
        if number > 2:  # a pipe ends when the process closes it
            with contextlib.suppress(OSError):
                os.close(number)

    def pass_on(received: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and its code is on the way
            os.kill(pid, received)

    for number in FORWARDED:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    code = _receive_number(connection)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _open_files() -> list[int]:
    files = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed them
            os.fstat(int(name))
            files.append(int(name))
    return files


def listen(name: str) -> socket.socket:
    """A socket that processes find by its name in this network namespace."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(f"\0{name}")
    listening.listen(64)
    return listening


def python_path() -> str:
    """PYTHONPATH with this checkout; packages that lie in a folder of their own stay importable."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


@functools.cache
def address() -> str:
    """Where the server listens that the environment names, else one that is started here.

    That one ends with this process, and is a fork of it where the session has chosen that.
    """
    if given := os.environ.get(ADDRESS):
        return given
    name = f"hetero-test-preloaded-{os.getpid()}"
    listening = listen(name)
    if FORKS_ITSELF in os.environ:
        _fork_server(listening)
        return name
    subprocess.Popen(
        [INTERPRETER, str(SERVER), str(listening.fileno())],
        env=os.environ | KEEPS_MEMORY | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
        pass_fds=[listening.fileno()],
        stdin=subprocess.PIPE,
    )
    listening.close()
    return name


def _fork_server(listening: socket.socket) -> None:
    its_stdin, open_while_we_live = os.pipe()
    if os.fork():
        os.close(its_stdin)
        listening.close()
        return
    try:
        from tests.preloaded_server import serve

        os.dup2(its_stdin, STDIN)
        os.close(open_while_we_live)
        serve(listening)
    finally:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(_stand_in(sys.argv[1:]))
