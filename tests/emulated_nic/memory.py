"""Registered memory as the emulated NIC reads and writes it: host memory, or a CUDA device's.

A copy to or from a GPU is a call of the GPU's driver, which makes it wait for what other threads of
the process have it do, the loading of a kernel for one. What takes long is therefore told.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tests.emulated_nic.report import report

STACKS_VARIABLE = "HETERO_TEST_NIC_STACKS"
"""Set to show what every thread of the process does when memory has been waited for too long."""

_MEMORY_TYPE, _DEVICE_ORDINAL = 2, 9
_DEVICE_MEMORY = 2
_SLOW_SECONDS = 0.1
_STDERR = 2


def read(address: int, nbytes: int, *, who: str) -> bytes:
    with _watched(who, f"reading {nbytes} bytes at {address:#x}"):
        device = _device_of(address)
        if device is None:
            return ctypes.string_at(address, nbytes)
        with torch.cuda.stream(torch.cuda.Stream(device)):
            return bytes(_view(address, nbytes, device).cpu().numpy().data)


def write(address: int, data: bytes, *, who: str) -> None:
    with _watched(who, f"writing {len(data)} bytes at {address:#x}"):
        device = _device_of(address)
        if device is None:
            ctypes.memmove(address, data, len(data))
        elif data:
            source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            stream = torch.cuda.Stream(device)
            with torch.cuda.stream(stream):
                _view(address, len(data), device).copy_(source)
            stream.synchronize()


@contextmanager
def _watched(who: str, what: str) -> Iterator[None]:
    """Tell of an access that took long or failed."""
    shows_stacks = STACKS_VARIABLE in os.environ
    if shows_stacks:
        # There is one such timer for the process; of accesses at once it watches the latest.
        faulthandler.dump_traceback_later(_SLOW_SECONDS, file=_STDERR)
    began = time.monotonic()
    try:
        yield
    except Exception as error:
        report(who, f"{what} failed ({type(error).__name__}: {error})")
        raise
    finally:
        if shows_stacks:
            faulthandler.cancel_dump_traceback_later()
    seconds = time.monotonic() - began
    if seconds > _SLOW_SECONDS:
        report(who, f"{what} took {seconds:.3f} s")


def _device_of(address: int) -> int | None:
    """The CUDA device that an address belongs to; None for host memory."""
    if not torch.cuda.is_initialized():
        return None
    driver = ctypes.CDLL("libcuda.so.1")
    kind, device = ctypes.c_uint(0), ctypes.c_int(0)
    where = ctypes.c_uint64(address)
    if driver.cuPointerGetAttribute(ctypes.byref(kind), _MEMORY_TYPE, where) != 0:
        return None
    if kind.value != _DEVICE_MEMORY:
        return None
    driver.cuPointerGetAttribute(ctypes.byref(device), _DEVICE_ORDINAL, where)
    return device.value


@dataclass(frozen=True)
class _Array:
    """Memory at an address, in the form in which torch takes it from other libraries."""

    address: int
    nbytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }


def _view(address: int, nbytes: int, device: int) -> torch.Tensor:
    return torch.as_tensor(_Array(address, nbytes), device=torch.device("cuda", device))
