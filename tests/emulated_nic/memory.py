"""Registered memory as the emulated NIC reads and writes it: host memory, or a CUDA device's."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

_MEMORY_TYPE, _DEVICE_ORDINAL = 2, 9
_DEVICE_MEMORY = 2


def read(address: int, nbytes: int) -> bytes:
    device = _device_of(address)
    if device is None:
        return ctypes.string_at(address, nbytes)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        return bytes(_view(address, nbytes, device).cpu().numpy().data)


def write(address: int, data: bytes) -> None:
    device = _device_of(address)
    if device is None:
        ctypes.memmove(address, data, len(data))
    elif data:
        source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            _view(address, len(data), device).copy_(source)
        stream.synchronize()


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
