"""Waiting on words of shared memory, across processes and without the GIL (Linux futex)."""

from __future__ import annotations

import ctypes
import errno
import platform
from typing import NamedTuple

from hetero.native.library import native

_SYSCALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_WAIT, _WAKE = 0, 1

# ctypes.CDLL releases the GIL for the length of the call.
_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Seen(NamedTuple):
    """A 32-bit word of memory, and what it was."""

    address: int
    value: int


def available() -> bool:
    return _SYSCALL is not None and platform.system() == "Linux"


def wait(address: int, expected: int, seconds: float) -> None:
    """Sleep while the 32-bit word at `address` is `expected`, for `seconds` at most."""
    whole = int(seconds)
    timeout = _Timespec(whole, int((seconds - whole) * 1e9))
    code = _libc.syscall(
        _SYSCALL, ctypes.c_void_p(address), _WAIT, ctypes.c_uint32(expected), ctypes.byref(timeout)
    )
    if code != 0 and ctypes.get_errno() not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
        raise OSError(ctypes.get_errno(), "futex wait failed")


def wake(address: int) -> None:
    """Wake every thread and process that waits on the word at `address`."""
    _libc.syscall(_SYSCALL, ctypes.c_void_p(address), _WAKE, ctypes.c_int(2**31 - 1), None)


def spin(one: Seen, other: Seen, *, seconds: float) -> None:
    """Look at two words until one is not what it was, for `seconds` at most."""
    native().native_spin(one.address, one.value, other.address, other.value, int(seconds * 1e6))
