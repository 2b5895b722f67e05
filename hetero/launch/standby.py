"""Standby processes: have imported what a rank imports, and become the next ranks of their node.

Most of a start is imports. A standby process has done them, without a GPU's context, and waits for
one line on stdin: the words, environment and files of the rank that it is to be. It ends when its
launcher does, which closes its stdin.

`python -m hetero.launch.standby SCRIPT` is such a process; `StandbyPool` is the launcher's side.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from hetero.collectives.backend import on_import_of_torch
from hetero.errors import print_line

_OF_TRAINING = (
    "megatron.hetero.pretrain",
    "megatron.hetero.initialize",
    "megatron.hetero.trainer",
    "megatron.hetero.cpu_shim",
    "megatron.hetero.overview",
    "megatron.core.tokenizers.text.text_tokenizer",
    "megatron.core.tokenizers.text.models",
    "hetero.cli",
    "hetero.tools.tool_command_line",
)
_OF_GPUS = (
    "megatron.hetero.compiled_kernels",
    "liger_kernel.ops.swiglu",
    "torch._inductor.compile_fx",
    "triton.compiler",
)
"""What the first step imports besides where there is a GPU: kernels, and what compiles them."""
_ENTRY = "pretrain_gpt.py"
_DELAY_SECONDS = 30.0
"""After a start of ranks, before new ones are made: they would compete with it."""
_LOOK_SECONDS = 0.2


class StandbyPool:
    """Keeps as many standby processes as a node has ranks. Threads: any."""

    def __init__(self, size: int, script: str) -> None:
        """`script`: what the ranks run, a file or the name of a module; makes the first ones."""
        self._size, self._script = size, script
        self._idle: list[subprocess.Popen[bytes]] = []
        self._imported: set[subprocess.Popen[bytes]] = set()
        """Those of them that are ready."""
        self._lock = threading.Lock()
        self._has_ranks = self._is_noted = False
        self._due = time.monotonic()
        self._closed = threading.Event()
        # One thread for all of them, which lasts: the kernel takes the end of the thread that has
        # started a process for the end of its parent.
        threading.Thread(target=self._run, name="standby processes", daemon=True).start()

    def take(self) -> subprocess.Popen[bytes] | None:
        """Remove a live process, which may still import, and return it; None if there is none.

        Delays the start of new ones.
        """
        with self._lock:
            self._has_ranks = True
            self._due = time.monotonic() + _DELAY_SECONDS
            while self._idle:
                process = self._idle.pop(0)
                self._imported.discard(process)
                if process.poll() is None:
                    return process
        return None

    def is_ready(self) -> bool:
        """Whether there is a process for each rank that has imported what ranks import."""
        with self._lock:
            return sum(one.poll() is None for one in self._imported) >= self._size

    def pids(self) -> set[int]:
        """Of those that are no rank yet. Without a lock: also called by a signal handler."""
        return {process.pid for process in tuple(self._idle)}

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.kill()
            process.wait()

    def _run(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            with self._lock:
                self._idle = [process for process in self._idle if process.poll() is None]
                self._imported.intersection_update(self._idle)
                missing = self._size - len(self._idle)
                is_due = time.monotonic() >= self._due and missing > 0
                count = 1 if self._has_ranks else missing
            if is_due:
                try:
                    self._add(count)
                except OSError as error:
                    # The end of this thread would end the ranks that it has started.
                    self._note(error)

    def _note(self, error: OSError) -> None:
        """No process could be started: a limit of processes, memory or open files."""
        with self._lock:
            self._due = time.monotonic() + _DELAY_SECONDS
        if self._is_noted:
            return
        self._is_noted = True
        with suppress(OSError):  # the log's disk may be full, too
            print_line(
                f"hetero.run: warning: {socket.gethostname()} could not start a standby process "
                f"({error.strerror or error}): a restart takes longer by its imports; raise the "
                "limit of processes (ulimit -u, pids.max), of memory or of open files"
            )

    def _add(self, count: int) -> None:
        """Make some, and wait until they are ready: each import takes a core, beside the ranks.

        Raises OSError if the system refuses one.
        """
        started: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
        try:
            for _ in range(count):
                started.append(self._start())
        finally:
            for process, ready in started:
                with ready:
                    ready.read()
                with self._lock:
                    if process in self._idle:
                        self._imported.add(process)

    def _start(self) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
        """One process, and a pipe that ends once it has imported everything."""
        here, there = os.pipe()
        ready = os.fdopen(here, "rb")
        try:
            process = subprocess.Popen(
                [sys.executable, "-u", "-m", "hetero.launch.standby", str(there), self._script],
                stdin=subprocess.PIPE,
                pass_fds=[there],
                start_new_session=True,
            )
        except OSError:
            ready.close()
            raise
        finally:
            os.close(there)
        with self._lock:
            if not self._closed.is_set():
                self._idle.append(process)
                return process, ready
        process.kill()
        process.wait()
        return process, ready


def become_rank(
    process: subprocess.Popen[bytes],
    words: Sequence[str],
    *,
    environ: Mapping[str, str],
    stdout: str | None,
    stderr: str | None,
) -> bool:
    """Have a standby process become a rank; False if it has ended.

    Args:
        words: what Python is given: a script or -m and a module, with its own words.
        environ: the whole environment.
        stdout, stderr: files that take what it prints; None: the launcher's own.
    """
    assert process.stdin is not None
    order = {
        "words": list(words),
        "environ": dict(environ),
        "folder": str(Path.cwd()),
        "files": {"1": stdout, "2": stderr},
    }
    try:
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.close()
    except OSError:
        return False
    return True


def main() -> None:
    ready, script = int(sys.argv[1]), sys.argv[2]
    _import(script)
    os.close(ready)
    line = sys.stdin.buffer.readline()
    if line.endswith(b"\n"):  # else the launcher has ended
        _become(json.loads(line))


def _import(script: str) -> None:
    """What the ranks of a script import."""
    if Path(script).name == _ENTRY or script.partition(".")[0] in ("hetero", "megatron"):
        from megatron.hetero.import_core import import_megatron_core

        import_megatron_core()
        for name in _OF_TRAINING:
            importlib.import_module(name)
        if importlib.import_module("torch").cuda.is_available():
            for name in _OF_GPUS:
                with suppress(ImportError):  # not all are needed, or installed
                    importlib.import_module(name)
            # The key of its cache: it reads all of Triton's files, and keeps what it finds.
            with suppress(ImportError, AttributeError):
                importlib.import_module("triton.runtime.cache").triton_key()
    else:
        importlib.import_module("torch.distributed")


def _become(order: Mapping[str, Any]) -> None:
    """Run the script as the interpreter would."""
    os.environ.clear()
    os.environ.update(order["environ"])
    os.chdir(order["folder"])
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for number, name in order["files"].items():
        if name:
            with open(name, "w") as file:
                os.dup2(file.fileno(), int(number))
    with suppress(OSError):  # for `ps`: its words, and its environment there, stay as they are
        Path("/proc/self/comm").write_text(f"rank {os.environ['RANK']}")
    on_import_of_torch()  # what it does depends on the environment
    sys.argv = list(order["words"])
    if sys.argv[0] == "-m":
        sys.path[0] = order["folder"]
        runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
