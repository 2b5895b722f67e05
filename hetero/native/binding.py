"""The library in C as Python has it: its structures, field by field, and its functions.

Every structure and number here is a twin of one in a header; a test compares them.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Mapping
from ctypes import (
    POINTER,
    Structure,
    c_bool,
    c_char,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_size_t,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from enum import IntEnum
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, ClassVar

from hetero.errors import LinkError

FOLDER = Path(__file__).parent
CHECKSUM_BYTES = 8
"""HOST_CHECKSUM_BYTES of host.h."""
TEXT_BYTES = 256
"""RAIL_TEXT_BYTES of rail.h."""
GID_BYTES = 16
RING_ENTRIES = 256
RING_HEADER_BYTES = 104
RING_FAULT_BYTES = 1024
_REMEDY = "install this project again (pip install -e .)"


class RingWord(Structure):
    """`struct ring_word`."""

    _fields_ = (("value", c_uint32), ("sleepers", c_uint32), ("unused", c_uint8 * 56))


class RingRecord(Structure):
    """`struct ring_record`."""

    _fields_ = (
        ("header", c_uint8 * RING_HEADER_BYTES),
        ("offset", c_uint64),
        ("nbytes", c_uint64),
        ("slot", c_uint64),
    )


class RingDirection(Structure):
    """`struct ring_direction`."""

    _fields_ = (
        ("produced", RingWord),
        ("consumed", RingWord),
        ("posted", RingWord),
        ("retired", RingWord),
        ("records", RingRecord * RING_ENTRIES),
    )


class RingEnd(Structure):
    """`struct ring_end`."""

    _fields_ = (
        ("doorbell", RingWord),
        ("closed", RingWord),
        ("fault_bytes", c_uint32),
        ("fault", c_char * RING_FAULT_BYTES),
        ("unused", c_uint8 * 60),
    )


class RingControl(Structure):
    """`struct ring_control`."""

    _fields_ = (
        ("ends", RingEnd * 2),
        ("directions", RingDirection * 2),
        ("places", c_uint64 * RING_ENTRIES * 2),
    )


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

    STEPS: ClassVar = (
        Step.COPY,
        Step.WAIT_VALUE,
        Step.WRITE_VALUE,
        Step.RECORD_EVENT,
        Step.WAIT_EVENT,
    )

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
        ("direction", c_uint64),
        ("produced_word", c_uint64),
        ("consumed_word", c_uint64),
        ("ring", c_uint64),
        ("ring_bytes", c_uint64),
        ("chunk_bytes", c_uint64),
        ("small_bytes", c_uint64),
        ("checksum_bytes", c_uint64),
        ("places", c_uint64),
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
        ("ends", c_uint64 * RING_ENTRIES),
        ("caller", c_uint64),
        ("by_caller", c_bool),
    )


class Progress(IntEnum):
    """`enum progress`."""

    WAITING = 0
    WHOLE = 1
    NEEDS_EVENT = 2
    REFUSED = 3
    FAILED = 4


class ExchangePart(Structure):
    """`struct exchange_part`."""

    _fields_ = (
        ("flow", c_uint64),
        ("address", c_uint64),
        ("nbytes", c_uint64),
        ("offset", c_uint64),
        ("count", c_uint64),
        ("progress", c_uint32),
        ("by_caller", c_uint32),
        ("header", c_uint8 * RING_HEADER_BYTES),
    )


class EngineOptions(Structure):
    """`struct engine_options`."""

    _fields_ = (
        ("control", c_uint64),
        ("side", c_uint64),
        ("ring_bytes", c_uint64),
        ("checksum_bytes", c_uint64),
        ("stall_seconds", c_double),
    )


class VerbsRequest(Structure):
    """`struct verbs_request`."""

    _fields_ = (
        ("device", c_char_p),
        ("port", c_uint8),
        ("reads_back", c_bool),
        ("dmabuf", c_int32),
        ("dmabuf_offset", c_uint64),
        ("rings", c_uint64),
        ("ring_bytes", c_uint64),
        ("control", c_uint64),
        ("psn", c_uint32),
    )


class VerbsConnectionInfo(Structure):
    """`struct verbs_connection_info`."""

    _fields_ = (
        ("qp", c_uint32),
        ("loopback_qp", c_uint32),
        ("receiving", c_uint64),
        ("receiving_key", c_uint32),
        ("control", c_uint64),
        ("control_key", c_uint32),
        ("by_dmabuf", c_bool),
    )


class VerbsRoute(Structure):
    """`struct verbs_route`."""

    _fields_ = (
        ("qp", c_uint32),
        ("psn", c_uint32),
        ("mtu", c_uint32),
        ("lid", c_uint16),
        ("gid", c_uint8 * GID_BYTES),
        ("gid_index", c_uint8),
        ("is_global", c_bool),
    )


class VerbsPeer(Structure):
    """`struct verbs_peer`."""

    _fields_ = (
        ("route", VerbsRoute),
        ("receiving", c_uint64),
        ("receiving_key", c_uint32),
        ("control", c_uint64),
        ("control_key", c_uint32),
        ("reads_back", c_bool),
    )


class VerbsPort(Structure):
    """`struct verbs_port`."""

    _fields_ = (
        ("state", c_int32),
        ("mtu", c_int32),
        ("max_message", c_uint32),
        ("lid", c_uint16),
        ("is_ethernet", c_bool),
    )


class TcpRequest(Structure):
    """`struct tcp_request`."""

    _fields_ = (
        ("fd", c_int32),
        ("sending", c_uint64),
        ("receiving", c_uint64),
        ("ring_bytes", c_uint64),
        ("control", c_uint64),
    )


_HANDLE, _TEXT = c_void_p, c_char_p

FUNCTIONS: dict[str, tuple[object, list[object]]] = {
    "ibverbs_load": (c_bool, [_TEXT, c_size_t]),
    "verbs_query_port": (c_bool, [c_char_p, c_uint8, POINTER(VerbsPort), _TEXT]),
    "carrier_new": (_HANDLE, [POINTER(EngineOptions), _TEXT]),
    "carrier_add_verbs": (
        c_bool,
        [_HANDLE, POINTER(VerbsRequest), POINTER(VerbsConnectionInfo), _TEXT],
    ),
    "carrier_connect_verbs": (
        c_bool,
        [_HANDLE, c_int, POINTER(VerbsPeer), POINTER(VerbsRoute), _TEXT],
    ),
    "carrier_add_tcp": (c_bool, [_HANDLE, POINTER(TcpRequest), _TEXT]),
    "carrier_start": (c_bool, [_HANDLE, _TEXT]),
    "carrier_words_notify": (None, [_HANDLE]),
    "carrier_progress": (None, [_HANDLE]),
    "carrier_loss_fd": (c_int, [_HANDLE]),
    "carrier_async_fd": (c_int, [_HANDLE, c_int]),
    "carrier_handle_async_event": (c_bool, [_HANDLE, c_int, _TEXT]),
    "carrier_next_loss": (c_int, [_HANDLE, _TEXT]),
    "carrier_stop_rail": (None, [_HANDLE, c_int]),
    "carrier_retransmit": (c_int, [_HANDLE, c_int]),
    "carrier_settle": (c_bool, [_HANDLE, c_double]),
    "carrier_settle_credits": (c_bool, [_HANDLE, c_double]),
    "carrier_signal": (None, [_HANDLE]),
    "carrier_free": (None, [_HANDLE]),
    "host_stream_create": (c_void_p, [POINTER(HostGpu)]),
    "host_stream_failure": (c_uint32, [c_void_p]),
    "host_stream_notify": (None, [c_void_p, c_void_p, c_void_p]),
    "host_stream_destroy": (None, [c_void_p]),
    "host_stream_synchronize": (c_bool, [c_void_p, c_uint32]),
    "host_wait_word": (c_bool, [c_void_p, c_uint32, c_uint32]),
    "host_read_word": (c_uint32, [c_void_p]),
    "host_write_word": (None, [c_void_p, c_uint32]),
    "host_ring": (None, [c_void_p]),
    "host_sleep": (None, [c_void_p, c_uint32, c_uint32]),
    "native_wait_value": (c_uint64, [POINTER(EntryPoints), c_uint64, c_uint64, c_uint32]),
    "native_write_value": (c_uint64, [POINTER(EntryPoints), c_uint64, c_uint64, c_uint32]),
    "native_spin": (None, [c_void_p, c_uint32, c_void_p, c_uint32, c_uint32]),
    "native_progress": (
        c_uint32,
        [POINTER(Flow), c_char_p, *(c_uint64,) * 4, c_bool, c_uint64, c_bool],
    ),
    "native_exchange": (c_uint32, [c_void_p, c_uint32, c_uint64, c_uint32]),
}
"""Of each function the type of the result, and those of the arguments."""


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
        library.native_version.restype = c_uint32
        if sources_version() not in (None, library.native_version()):
            raise LinkError(
                f"the links' library in C was not built from the sources beside it; {_REMEDY}"
            )
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise LinkError(f"the links' library in C cannot be used ({error}); {_REMEDY}") from error
    return library


def sources_version() -> int | None:
    """The version of a library built from the sources that lie here; None where none do.

    An editable install leaves them beside a library that may be older. Python would then read its
    structures wrongly, and a link hang.
    """
    content = b"".join(path.read_bytes() for path in sorted(FOLDER.glob("*.[ch]")))
    return zlib.crc32(content) if content else None
