"""Builds the forwarder over NICs that are copies within one process, and puts faults on them.

*Emulated*: it says nothing of a real NIC. What runs is the forwarder's own C, but for the calls of
libibverbs.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path

from hetero.transport.verbs.native.library import FOLDER, load
from tests.hip_on_cuda.library import COMPILER

SOURCES = [*sorted(FOLDER.glob("*.c")), Path(__file__).with_name("loopback_verbs.c")]
HEADERS = Path("/usr/include/infiniband/verbs.h")
DEVICES = ("a0", "a1", "b0", "b1")
_COPIER = ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64)


class Fault(IntEnum):
    """What is wrong with a NIC."""

    FINE = 0
    CUT = 1
    """Requests fail, at either end."""
    SILENT = 2
    """Requests never complete, at either end."""


def lacking() -> str | None:
    """Why this machine cannot build it."""
    if COMPILER is None:
        return "needs a C compiler (cc) to build the forwarder"
    return None if HEADERS.exists() else "needs libibverbs' headers (Debian: libibverbs-dev)"


class LoopbackNics:
    """The NICs a0, a1 of one end and b0, b1 of the other; rail 0 joins a0 with b0."""

    def __init__(self) -> None:
        self.library = load(_built())
        self._copier: object = None
        for name in ("loopback_reads", "loopback_writes", "loopback_open_objects"):
            getattr(self.library, name).restype = ctypes.c_long

    def break_with(self, name: str, fault: Fault) -> None:
        self.library.loopback_break(name.encode(), int(fault))

    def take_port_down(self, name: str) -> None:
        """Silence it, and have the device tell of it."""
        self.library.loopback_take_port_down(name.encode())

    def hold_writes(self, name: str) -> None:
        """What is written to a ring that may be read back is seen only after it has been read."""
        self.library.loopback_hold_writes(name.encode(), True)

    def refuse_memory(self, name: str) -> None:
        """It registers no memory by its address."""
        self.library.loopback_refuse_memory(name.encode())

    def know_dmabuf(self, descriptor: int, begins: int) -> None:
        """Have it register a dma-buf that begins at this address; 0 to have it refused."""
        self.library.loopback_know_dmabuf(descriptor, ctypes.c_uint64(begins))

    def break_reads(self, name: str) -> None:
        """It cannot read its own memory back."""
        self.library.loopback_break_reads(name.encode())

    def leave_out_copies(self, name: str) -> None:
        """Have data count as arrived without being copied, to see what all else costs."""
        self.library.loopback_copy(name.encode(), False)

    def copy_with(self, copy: Callable[[int, int, int], None] | None) -> None:
        """Copy bytes by a function of target, source and number; None for the CPU's own way.

        It is called on the forwarders' threads, and returns when the bytes are there.
        """
        made = None if copy is None else _COPIER(copy)
        self.library.loopback_copy_with(made or ctypes.c_void_p())
        # The library keeps its address alone.
        self._copier = made

    def reads(self, name: str) -> int:
        return int(self.library.loopback_reads(name.encode()))

    def writes(self, name: str) -> int:
        """How many records and data have come in."""
        return int(self.library.loopback_writes(name.encode()))

    def open_objects(self) -> int:
        return int(self.library.loopback_open_objects())

    def mend(self) -> None:
        self.copy_with(None)
        for name in DEVICES:
            self.library.loopback_mend(name.encode())


@functools.cache
def _built() -> Path:
    """The library, built once for each version of its sources and kept with temporary files."""
    everything = [*SOURCES, *sorted(FOLDER.glob("*.h"))]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in everything)).hexdigest()[:16]
    target = Path(tempfile.gettempdir()) / f"libloopback_forwarder-{os.getuid()}-{digest}.so"
    if not target.exists():
        _compile(target)
    return target


def _compile(target: Path) -> None:
    assert COMPILER is not None, lacking()
    partial = target.with_suffix(f".{os.getpid()}")
    command = [COMPILER, "-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror"]
    command += [
        "-shared",
        "-fPIC",
        "-Wl,-Bsymbolic",
        "-o",
        str(partial),
        *map(str, SOURCES),
        "-lpthread",
    ]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    partial.rename(target)
