"""The functions and structures of native.h, as Python has them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, Structure, c_bool, c_char_p, c_uint32, c_uint64, c_void_p
from enum import IntEnum
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from hetero.errors import LinkError
from hetero.native.carrier import FUNCTIONS as CARRIER_FUNCTIONS

CHECKSUM_BYTES = 8
"""HOST_CHECKSUM_BYTES of host.h."""
FOLDER = Path(__file__).parent
_REMEDY = "install this project again (pip install -e .)"


class Vendor(IntEnum):
    """`enum vendor`."""

    CUDA = 0
    HIP = 1


class Step(IntEnum):
    """`enum step`."""

    WAIT_VALUE = 1
    COPY = 2
    WRITE_VALUE = 3
    RECORD_EVENT = 4
    WAIT_EVENT = 5
    PAST_COUNTER = 6
    CHECKSUM = 7


class EntryPoints(Structure):
    """`struct entry_points`."""

    _fields_ = (
        ("vendor", c_uint64),
        ("end_of_counter", c_uint64),
        ("copy", c_uint64),
        ("wait_value", c_uint64),
        ("write_value", c_uint64),
        ("record_event", c_uint64),
        ("wait_event", c_uint64),
    )

    @classmethod
    def of(
        cls, functions: Mapping[Step, Any], *, vendor: Vendor, end_of_counter: int
    ) -> EntryPoints:
        """Where functions lie that ctypes has found or made; whoever calls keeps them."""
        addresses = {
            step.name.lower(): ctypes.cast(function, c_void_p).value
            for step, function in functions.items()
        }
        return cls(vendor=vendor, end_of_counter=end_of_counter, **addresses)


class Streams(Structure):
    """`struct streams`."""

    _fields_ = (
        ("driver", EntryPoints),
        ("copies", c_uint64),
        ("waits", c_uint64),
        ("writes", c_uint64),
        ("join", c_uint64),
        ("callers_wait", c_bool),
        ("writes_lag", c_bool),
    )


class HostGpu(Structure):
    """`struct host_gpu`."""

    _fields_ = (
        ("vendor", c_uint64),
        ("copy", c_uint64),
        ("synchronize_stream", c_uint64),
        ("synchronize_event", c_uint64),
        ("set_current", c_uint64),
        ("context", c_uint64),
        ("stream", c_uint64),
    )


class HostFailure(IntEnum):
    """`enum host_failure`."""

    FINE = 0
    GPU_FAILED = 1
    WRONG_CHECKSUM = 2


class Flow(Structure):
    """`struct flow`."""

    _fields_ = (
        ("streams", Streams),
        ("posted", c_uint64),
        ("retired", c_uint64),
        ("produced", c_uint64),
        ("consumed", c_uint64),
        ("records", c_uint64),
        ("produced_word", c_uint64),
        ("consumed_word", c_uint64),
        ("ring", c_uint64),
        ("ring_bytes", c_uint64),
        ("chunk_bytes", c_uint64),
        ("small_bytes", c_uint64),
        ("entries", c_uint64),
        ("header_bytes", c_uint64),
        ("record_bytes", c_uint64),
        ("alignment", c_uint64),
        ("checksum_bytes", c_uint64),
        ("ends", c_uint64),
        ("doorbell", c_uint64),
        ("is_outgoing", c_bool),
        ("count", c_uint64),
        ("offset", c_uint64),
        ("awaited", c_uint64),
        ("failed", c_uint64),
        ("head", c_uint64),
        ("tail", c_uint64),
        ("freed", c_uint64),
        ("in_flight", c_uint64),
        ("oldest", c_uint64),
        ("caller", c_uint64),
        ("by_caller", c_bool),
    )


class Progress(IntEnum):
    """`enum progress`."""

    WAITING = 0
    WHOLE = 1
    UNMARKED = 2
    REFUSED = 3
    FAILED = 4


_FUNCTIONS: dict[str, tuple[object, list[object]]] = {
    **CARRIER_FUNCTIONS,
    "host_stream_create": (c_void_p, [POINTER(HostGpu)]),
    "host_stream_failure": (c_uint32, [c_void_p]),
    "host_stream_notify": (None, [c_void_p, c_void_p, c_void_p]),
    "host_stream_destroy": (None, [c_void_p]),
    "host_stream_synchronize": (c_bool, [c_void_p, c_uint32]),
    "host_wait_word": (c_bool, [c_void_p, c_uint32, c_uint32]),
    "native_spin": (None, [c_void_p, c_uint32, c_void_p, c_uint32, c_uint32]),
    "native_bring_on": (
        c_uint32,
        [
            POINTER(Flow),
            c_char_p,
            c_uint64,
            c_uint64,
            c_uint64,
            c_uint64,
            c_bool,
            c_uint64,
            c_bool,
        ],
    ),
}
_VERSION = 1


@cache
def native(path: Path | None = None) -> ctypes.CDLL:
    """The library, with the types of its functions. Its calls release the GIL.

    Raises LinkError, with the remedy, where it is not built or cannot be used. `path` is for tests.
    """
    path = path or next(
        filter(Path.exists, (FOLDER / f"_native{s}" for s in EXTENSION_SUFFIXES)), None
    )
    if path is None:
        raise LinkError(f"the links' library in C is not built; {_REMEDY}")
    try:
        library = ctypes.CDLL(str(path), use_errno=True)
        version = int(library.native_version())
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise LinkError(f"the links' library in C cannot be used ({error}); {_REMEDY}") from error
    if version != _VERSION:
        raise LinkError(
            f"the links' library in C is of version {version} and {_VERSION} is needed; {_REMEDY}"
        )
    return library
