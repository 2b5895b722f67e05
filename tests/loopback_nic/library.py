"""NICs that are copies within one process, opened in the place of libibverbs, and faults on them.

*Emulated*: it says nothing of a real NIC. What runs is the project's own library, a second copy of
it in this process: the first keeps the libibverbs that it has opened or missed.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from unittest import mock

from hetero.native.binding import checked, native
from hetero.native.headers import FOLDER
from tests.hip_on_cuda.library import COMPILER, compiled

SOURCE = Path(__file__).with_name("loopback_verbs.c")
VARIABLE = "HETERO_IBVERBS_LIBRARY"
DEVICES = ("a0", "a1", "b0", "b1")
GID = "0000:0000:0000:0000:0000:ffff:0a01:000{}"
GID_INDEX = 1
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
    return None if COMPILER is not None else "needs a C compiler (cc) to build the emulated NICs"


class LoopbackNics:
    """The NICs a0, a1 of one end and b0, b1 of the other; rail 0 joins a0 with b0.

    `sys_root` is where their folders are made as the kernel would have them in sysfs.
    """

    def __init__(self, sys_root: Path) -> None:
        self.sys_root = sys_root
        for number, name in enumerate(DEVICES):
            port = sys_root / "class/infiniband" / name / "ports/1"
            for path, text in (("gids", GID.format(number)), ("gid_attrs/types", "RoCE v2")):
                (port / path).mkdir(parents=True)
                (port / path / str(GID_INDEX)).write_text(text + "\n")
        self.library, self._nics = _loaded()
        self._copier: object = None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """What is opened meanwhile finds these NICs."""
        with (
            mock.patch("hetero.link.carrier.native", return_value=self.library),
            mock.patch("hetero.link.rdma_ports.native", return_value=self.library),
        ):
            yield

    def break_with(self, name: str, fault: Fault) -> None:
        self._nics.loopback_break(name.encode(), int(fault))

    def take_port_down(self, name: str) -> None:
        """Silence it, and have the device tell of it."""
        self._nics.loopback_take_port_down(name.encode())

    def hold_writes(self, name: str) -> None:
        """What is written to a ring that may be read back is seen only after it has been read."""
        self._nics.loopback_hold_writes(name.encode(), True)

    def refuse_memory(self, name: str) -> None:
        """It registers no memory by its address."""
        self._nics.loopback_refuse_memory(name.encode())

    def know_dmabuf(self, descriptor: int, begins: int) -> None:
        """Have it register a dma-buf that begins at this address; 0 to have it refused."""
        self._nics.loopback_know_dmabuf(descriptor, ctypes.c_uint64(begins))

    def limit(self, name: str, *, max_message: int = 1 << 30, max_requests: int = 16384) -> None:
        self._nics.loopback_limit(name.encode(), max_message, max_requests)

    def activate(self, name: str, *, is_active: bool) -> None:
        """Whether its port is up, without telling of it."""
        self._nics.loopback_activate(name.encode(), is_active)

    def break_reads(self, name: str) -> None:
        """It cannot read its own memory back."""
        self._nics.loopback_break_reads(name.encode())

    def copy_with(self, copy: Callable[[int, int, int], None] | None) -> None:
        """Copy bytes by a function of target, source and number; None for the CPU's own way.

        It is called on the carriers' threads, and returns when the bytes are there.
        """
        made = None if copy is None else _COPIER(copy)
        self._nics.loopback_copy_with(made or ctypes.c_void_p())
        # The library keeps its address alone.
        self._copier = made

    def reads(self, name: str) -> int:
        return int(self._nics.loopback_reads(name.encode()))

    def writes(self, name: str) -> int:
        """How many records and data have come in."""
        return int(self._nics.loopback_writes(name.encode()))

    def open_objects(self) -> int:
        return int(self._nics.loopback_open_objects())

    def mend(self) -> None:
        self.copy_with(None)
        for name in DEVICES:
            self._nics.loopback_mend(name.encode())


@functools.cache
def _loaded() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """The project's library with the emulated NICs behind it, and these."""
    path = compiled(SOURCE, include=FOLDER)
    beside = (FOLDER / f"_native{suffix}" for suffix in EXTENSION_SUFFIXES)
    built = next(filter(Path.exists, beside))
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copy(built, folder)
        library = native(Path(copy))
    os.environ[VARIABLE] = str(path)
    try:
        checked(library.ibverbs_load)
    finally:
        del os.environ[VARIABLE]
    nics = ctypes.CDLL(str(path))
    for name in ("loopback_reads", "loopback_writes", "loopback_open_objects"):
        getattr(nics, name).restype = ctypes.c_long
    return library, nics
