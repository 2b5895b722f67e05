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
from pathlib import Path
from typing import Any
from unittest import mock

from hetero.link.nics import find_ports
from hetero.native.binding import FOLDER, LIBRARY, checked, native
from tests.hip_on_cuda.library import COMPILER, compiled

SOURCES = [Path(__file__).with_name(f"loopback_{part}.c") for part in ("verbs", "carry")]
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


class Settings(ctypes.Structure):
    """`struct settings` of loopback_nic.h: of one NIC."""

    _fields_ = (
        ("fault", ctypes.c_int),
        ("completions_fd", ctypes.c_int),
        ("holds_writes", ctypes.c_bool),
        ("cannot_read", ctypes.c_bool),
        ("refuses_memory", ctypes.c_bool),
        ("is_down", ctypes.c_bool),
        ("max_message", ctypes.c_uint32),
        ("max_requests", ctypes.c_int),
        ("reads", ctypes.c_long),
        ("writes", ctypes.c_long),
    )


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
        self._settings = (Settings * len(DEVICES)).in_dll(self._nics, "loopback_settings")
        self._copier: object = None

    def __getitem__(self, name: str) -> Any:
        """A NIC's `Settings`."""
        return self._settings[DEVICES.index(name)]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """What is opened meanwhile finds these NICs."""
        with (
            mock.patch("hetero.link.carrier.native", return_value=self.library),
            mock.patch("hetero.link.nics.native", return_value=self.library),
            mock.patch(
                "hetero.link.verbs.find_ports",
                functools.partial(find_ports, sys_root=self.sys_root),
            ),
            mock.patch("hetero.link.verbs._MAX_STALL_SECONDS", 0.5),
        ):
            yield

    def end_completion_events(self, name: str) -> None:
        """Have their descriptor report errors alone, as where the device was removed."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self[name].completions_fd, inheritable=False)
        os.close(nowhere)

    def know_dmabuf(self, descriptor: int, begins: int) -> None:
        """Have it register a dma-buf that begins at this address; 0 to have it refused."""
        known = (ctypes.c_uint64 * (descriptor + 1)).in_dll(self._nics, "loopback_dmabufs")
        known[descriptor] = begins

    def copy_with(self, copy: Callable[[int, int, int], None] | None) -> None:
        """Copy bytes by a function of target, source and number; None for the CPU's own way.

        It is called on the carriers' threads, and returns when the bytes are there.
        """
        made = None if copy is None else _COPIER(copy)
        address = ctypes.cast(made, ctypes.c_void_p).value if made else None
        ctypes.c_void_p.in_dll(self._nics, "loopback_copier").value = address
        # The library keeps its address alone.
        self._copier = made

    def open_objects(self) -> int:
        return ctypes.c_long.in_dll(self._nics, "loopback_open_objects").value

    def mend(self) -> None:
        self.copy_with(None)
        ctypes.memset(self._settings, 0, ctypes.sizeof(self._settings))


@functools.cache
def _loaded() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """The project's library with the emulated NICs behind it, and these."""
    path = compiled(*SOURCES, include=FOLDER)
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copy(LIBRARY, folder)
        library = native(Path(copy))
    os.environ[VARIABLE] = str(path)
    try:
        checked(library.ibverbs_load)
    finally:
        del os.environ[VARIABLE]
    return library, ctypes.CDLL(str(path))
