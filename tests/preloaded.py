"""Python scripts as processes of their own, that start with torch and megatron-core imported.

Importing them takes a process five seconds of a core, a tiny training one. One server imports them
once; each process is a fork of it, with its own arguments, environment and streams. It runs the
script as `python SCRIPT` would.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMPORTED = ("megatron.training.pretrain", "megatron.training.session")
READ_AT_IMPORT = ("PYTHONPATH", "OMP_NUM_THREADS", "LD_PRELOAD", "LD_LIBRARY_PATH")
"""What a process cannot be given any more once these modules are imported."""
LARGEST_REQUEST = 1 << 20


class Process:
    """A process that the server has forked; as much of `subprocess.Popen` as the tests need."""

    def __init__(self, status: socket.socket, stdout: int, stderr: int) -> None:
        self._status = status.makefile("r")
        self._selectable = status
        self.stdout = os.fdopen(stdout, errors="replace")
        self.stderr = os.fdopen(stderr, errors="replace")
        self.pid = int(self._status.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout=0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._selectable, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired("a preloaded process", timeout or 0)
            self.returncode = int(self._status.readline())
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read both streams to their ends, then wait for the process."""
        deadline = None if timeout is None else time.monotonic() + timeout
        read: dict[object, list[bytes]] = {self.stdout: [], self.stderr: []}
        with selectors.DefaultSelector() as selector:
            for stream in read:
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


def start(
    script: Path, words: Sequence[str], *, environ: Mapping[str, str]
) -> Process | subprocess.Popen[str]:
    """Start `python script *words` with exactly this environment and both streams piped."""
    words = [str(script), *words]
    if any(environ.get(name) != _serving()[name] for name in READ_AT_IMPORT):
        return subprocess.Popen(
            [sys.executable, *words],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    ours, status = socket.socketpair()
    (out, its_out), (err, its_err) = os.pipe(), os.pipe()
    request = json.dumps({"argv": words, "environ": dict(environ), "cwd": os.getcwd()}).encode()
    assert len(request) <= LARGEST_REQUEST
    socket.send_fds(_server(), [request], [its_out, its_err, status.fileno()])
    os.close(its_out)
    os.close(its_err)
    status.close()
    return Process(ours, out, err)


def _serving() -> dict[str, str | None]:
    """What the server's own environment says of what is read at import."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {name: os.environ.get(name) for name in READ_AT_IMPORT}
    return own | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


@functools.cache
def _server() -> socket.socket:
    """The server of this process and its tests; it ends when this end of the socket is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST_REQUEST)
    environ = os.environ | {k: v for k, v in _serving().items() if v is not None}
    subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno())],
        env=environ,
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
    )
    theirs.close()
    return ours


def _serve(requests: socket.socket) -> None:
    from megatron.training.quiet import quiet_core

    quiet_core()
    for name in IMPORTED:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"
    children: dict[int, socket.socket] = {}
    ended, woken = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(ended, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        selector.register(ended, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj == ended:
                    os.read(ended, 1 << 10)
                    _reap(children)
                    continue
                request, streams, *_ = socket.recv_fds(requests, LARGEST_REQUEST, 3)
                if not request:
                    return
                _fork(json.loads(request), streams, children)


def _reap(children: dict[int, socket.socket]) -> None:
    """Tell how each child ended that has ended."""
    while children:
        pid, how = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        status = children.pop(pid)
        with contextlib.suppress(OSError):
            status.sendall(f"{os.waitstatus_to_exitcode(how)}\n".encode())
        status.close()


def _fork(request: dict, streams: list[int], children: dict[int, socket.socket]) -> None:
    status = socket.socket(fileno=streams[2])
    pid = os.fork()
    if pid:
        for stream in streams[:2]:
            os.close(stream)
        status.sendall(f"{pid}\n".encode())
        children[pid] = status
        return
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(streams[0], 1)
        os.dup2(streams[1], 2)
        os.closerange(3, 1 << 10)
        code = _run(request)
    finally:
        os._exit(code)


def _run(request: dict) -> int:
    """Run the script as the interpreter would; its exit code."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.argv = request["argv"]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    _at_exit()
    return code


def _at_exit() -> None:
    """What the interpreter does at its end: threads, then what was registered, then the streams."""
    import atexit
    import threading

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()  # type: ignore[attr-defined]
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
