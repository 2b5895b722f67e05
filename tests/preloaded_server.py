"""The server of tests/preloaded.py: imports torch and megatron-core, and forks on request.

Started by itself, it imports when somebody asks for the first time, which not every session does.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import selectors
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.preloaded import LARGEST_REQUEST, ROOT, STDIN

IMPORTED = (
    "encodings.idna",
    "hetero.cli",
    "hetero.observe.throttling",
    "megatron.core.tokenizers.text.models",
    "megatron.core.tokenizers.text.text_tokenizer",
    "megatron.hetero.checkpoint.save_folder",
    "megatron.hetero.cpu_shim",
    "megatron.hetero.initialize",
    "megatron.hetero.pretrain",
    "megatron.hetero.trainer",
)
MOST_FILES = 200
UNUSED = 1 << 9
"""The first number of those that none of a process's open files has."""


def _read_at_import(environ: Mapping[str, str]) -> list[object]:
    """What a process cannot be given any more once the modules are imported."""
    paths = {*environ.get("PYTHONPATH", "").split(os.pathsep)} - {"", str(ROOT)}
    return [paths, *map(environ.get, ("OMP_NUM_THREADS", "LD_PRELOAD", "LD_LIBRARY_PATH"))]


class Server:
    """Forks this process for whoever asks at a socket, until stdin ends."""

    def __init__(self, listening: socket.socket) -> None:
        self._own = _read_at_import(os.environ)
        # A fork has its own thread alone: those that the libraries of a GPU start would be missing.
        self._may_fork = len(os.listdir("/proc/self/task")) == 1
        self._listening = listening
        self._children: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()

    def serve(self) -> None:
        ended, woken = os.pipe()
        os.set_blocking(woken, False)
        signal.set_wakeup_fd(woken)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._selector.register(ended, selectors.EVENT_READ)
        # Who started this one holds the other end of it.
        self._selector.register(STDIN, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == STDIN:
                    for pid in self._children:
                        os.kill(pid, signal.SIGKILL)
                    return
                if key.fileobj == ended:
                    os.read(ended, 1 << 10)
                    self._reap()
                elif key.fileobj == self._listening:
                    self._answer(self._listening.accept()[0])
                else:
                    self._end_child_of(key.fileobj)

    def _answer(self, connection: socket.socket) -> None:
        """Whoever asks may be killed before it has asked, or before it hears the answer."""
        request, files, *_ = socket.recv_fds(connection, LARGEST_REQUEST, MOST_FILES)
        if not request:
            connection.close()
            return
        asked = json.loads(request)
        if not self._may_fork or _read_at_import(asked["environ"]) != self._own:
            with contextlib.suppress(OSError):
                connection.sendall(b"0")
            connection.close()
        elif pid := os.fork():
            with contextlib.suppress(OSError):
                connection.sendall(str(pid).encode())
            self._children[pid] = connection
            self._selector.register(connection, selectors.EVENT_READ)
        else:
            _be_child(asked, files)
        for file in files:
            os.close(file)

    def _reap(self) -> None:
        """Tell how each child ended that has ended."""
        while self._children:
            pid, how = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            connection = self._children.pop(pid)
            self._selector.unregister(connection)
            with contextlib.suppress(OSError):
                connection.sendall(str(os.waitstatus_to_exitcode(how)).encode())
            connection.close()

    def _end_child_of(self, closed: object) -> None:
        for pid, connection in self._children.items():
            if connection is closed:
                os.kill(pid, signal.SIGKILL)


def _be_child(asked: dict, files: list[int]) -> None:
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        kept = [fcntl.fcntl(file, fcntl.F_DUPFD, UNUSED) for file in files]
        os.closerange(3, UNUSED)
        for number, file in zip(asked["files"], kept, strict=True):
            os.dup2(file, number)
        os.closerange(UNUSED, 2 * UNUSED)
        code = _run(asked)
    finally:
        os._exit(code)


def _run(asked: dict) -> int:
    """Run the script as the interpreter would; its exit code."""
    import multiprocessing
    import runpy
    import types

    from hetero.collectives.backend import on_import_of_torch

    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["environ"])
    for name, stream in (("stdout", 1), ("stderr", 2)):
        opened = open(stream, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
        setattr(sys, name, opened)
        setattr(sys, f"__{name}__", opened)
    sys.executable = os.environ.get("PYTHON_EXEC", sys.executable)
    multiprocessing.set_executable(sys.executable)
    # What it does depends on the environment.
    on_import_of_torch()
    sys.argv = asked["argv"]
    try:
        if sys.argv[0] == "-m":
            sys.path[0] = asked["cwd"]
            runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
        elif sys.argv[0] == "-c":
            sys.path[0] = ""
            sys.modules["__main__"] = types.ModuleType("__main__")
            exec(sys.argv.pop(1), vars(sys.modules["__main__"]))
        else:
            sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
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
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()


def serve(listening: socket.socket) -> None:
    import gc
    import importlib
    import weakref

    from hetero import version
    from hetero.link import open as open_module
    from megatron.hetero.import_core import import_megatron_core

    import_megatron_core()
    for name in IMPORTED:
        importlib.import_module(name)
    # Every rank reads all files for it, which do not change.
    version.sources()
    # Megabytes would be an eighth of what a rank of a tiny run computes. Tests of links send them.
    open_module.PROBE_SIZES = (1, 4_097, 70_001)
    # At exit, PyTorch takes its operators out of its dispatcher one by one, and so copies that
    # memory: nearly half of what a child of a tiny run would copy.
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False
    # Else each child would look through all of this for garbage, and so copy the memory it is in.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)
    Server(listening).serve()


if __name__ == "__main__":
    asked_at = socket.socket(fileno=int(sys.argv[1]))
    if STDIN not in select.select([asked_at.fileno(), STDIN], [], [])[0]:
        serve(asked_at)
