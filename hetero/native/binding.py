"""The library in C for ctypes: its functions, and the structures and numbers that both sides share.

The structures come from the library itself, whose compiler has laid them out: its table names every
member with its type and place (layout.c).
"""

from __future__ import annotations

import ctypes
import os
import zlib
from collections.abc import Callable, Iterator
from ctypes import c_bool, c_char_p, c_double, c_int, c_uint8, c_uint32, c_uint64, c_void_p
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

from hetero.errors import LinkError

FOLDER = Path(__file__).parent
LIBRARY = FOLDER / "_native.so"
_REMEDY = "install this project again (in a checkout: pip install -e .)"
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    # host.h
    "host_stream_create": (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
    "host_stream_failure": (c_uint32, c_void_p),
    "host_stream_destroy": (None, c_void_p),
    "host_stream_synchronize": (c_bool, c_void_p, c_uint32),
    "host_enqueue": (c_int, c_void_p, c_void_p),
    "host_wait_word": (c_bool, c_void_p, c_uint32, c_uint32, c_uint32),
    "host_acquire": (None,),
    "host_write_word": (None, c_void_p, c_uint32),
    "host_ring_doorbell": (None, c_void_p),
    "host_arm_doorbell": (c_bool, c_void_p, c_uint32),
    # streams.h
    "native_wait_value": (c_uint64, c_void_p, c_uint64, c_uint64, c_uint32),
    "native_write_value": (c_uint64, c_void_p, c_uint64, c_uint64, c_uint32),
    # flow.h
    "native_init_flow": (None, c_void_p),
    "native_begin": (None, c_void_p),
    "native_abort": (None, c_void_p),
    "native_progress": (c_uint32, c_void_p, c_bool),
    "native_exchange": (c_uint32, c_void_p, c_uint32, c_uint32, c_uint32),
    # proxy.h
    "proxy_new": (c_void_p, c_char_p),
    "proxy_free": (None, c_void_p),
    # carrier.h
    "carrier_new": (c_void_p, c_void_p, c_void_p, c_char_p),
    "carrier_add_verbs": (c_bool, c_void_p, c_char_p, c_uint8, c_void_p, c_void_p, c_char_p),
    "carrier_connect_verbs": (c_bool, c_void_p, c_int, c_void_p, c_void_p, c_void_p, c_char_p),
    "carrier_add_tcp": (c_bool, c_void_p, c_int, c_char_p),
    "carrier_start": (c_bool, c_void_p, c_char_p),
    "carrier_reopen_tcp": (c_bool, c_void_p, c_int, c_int, c_char_p),
    "carrier_drive_flows": (None, c_void_p, c_void_p, c_void_p),
    "carrier_progress": (None, c_void_p),
    "carrier_loss_fd": (c_int, c_void_p),
    "carrier_next_loss": (c_int, c_void_p, c_char_p, c_void_p),
    "carrier_stop_rail": (None, c_void_p, c_int),
    "carrier_retransmit": (c_int, c_void_p, c_int),
    "carrier_rail_counters": (c_uint64, c_void_p, c_void_p, c_int),
    "carrier_drain": (c_bool, c_void_p, c_double),
    "carrier_flush_credits": (c_bool, c_void_p, c_double),
    "carrier_free": (None, c_void_p),
    # ibverbs.h, verbs.h
    "ibverbs_load": (c_bool, c_char_p),
    "verbs_query_port": (c_bool, c_char_p, c_uint8, c_void_p, c_char_p),
}
"""The result and the arguments of each function. Addresses are ints, pointers too."""


@cache
def native(path: Path | None = None) -> ctypes.CDLL:
    """The library, with typed functions. Calls release the GIL.

    Raises LinkError, with the remedy, if it is not built or cannot be loaded. `path` is for tests.
    """
    path = path or LIBRARY
    if not path.exists():
        raise LinkError(f"the links' library in C is not built; {_REMEDY}")
    try:
        library = ctypes.CDLL(str(path), use_errno=True)
        library.native_version.restype = c_uint32
        if sources_version() not in (None, library.native_version()):
            raise LinkError(
                f"the links' library in C was not built from the sources beside it; {_REMEDY}"
            )
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise LinkError(f"the links' library in C cannot be used ({error}); {_REMEDY}") from error
    return library


@cache
def acquire_fence() -> Callable[[], None]:
    """`host_acquire`, by a call that keeps the GIL: it takes a quarter of the time of others."""
    fence: Callable[[], None] = ctypes.PYFUNCTYPE(None)(("host_acquire", native()))
    return fence


def checked(function: Any, *arguments: object) -> Any:
    """Call a function that returns false or NULL on failure, with the reason in its last argument.

    Raises LinkError with that reason.
    """
    reason = ctypes.create_string_buffer(TEXT_BYTES)
    if not (result := function(*arguments, reason)):
        raise LinkError(reason.value.decode(errors="replace"))
    return result


def proxy() -> int:
    """The `struct proxy` of this process, made at the first call, for as long as it runs.

    A forked child makes its own: it does not have its parent's threads. Raises LinkError.
    """
    process = os.getpid()
    if (known := _proxies.get(process)) is None:
        made = int(checked(native().proxy_new))
        known = _proxies.setdefault(process, made)
        if known != made:  # another thread was first
            native().proxy_free(made)
    return known


_proxies: dict[int, int] = {}
"""By the process: not a lock, which a forked child could find held."""


def sources_version() -> int | None:
    """The version that a library built from the sources here would have; None without sources.

    In an editable install the library may be older than the sources beside it.
    """
    if not any(FOLDER.glob("*.c")):
        return None
    return zlib.crc32(b"".join(path.read_bytes() for path in sorted(FOLDER.glob("*.[ch]"))))


class _Member(ctypes.Structure):
    """`struct layout_member`."""

    _fields_ = (
        ("structure", c_char_p),
        ("name", c_char_p),
        ("type", c_char_p),
        ("offset", c_uint32),
        ("nbytes", c_uint32),
    )


class _Number(ctypes.Structure):
    """`struct layout_number`."""

    _fields_ = (("kind", c_char_p), ("name", c_char_p), ("value", ctypes.c_int64))


def _rows(table: str, row: Any) -> Iterator[Any]:
    rows = ctypes.pointer(row.in_dll(native(), table))
    index = 0
    while getattr(rows[index], row._fields_[0][0]) is not None:
        yield rows[index]
        index += 1


def _structures() -> dict[str, Any]:
    """Each structure that is shared, by its name in C. Raises LinkError for a member left out."""
    names = "bool char double int32 uint8 uint16 uint32 uint64".split()
    types: dict[str, Any] = {name: getattr(ctypes, f"c_{name}") for name in names}
    fields: list[tuple[str, Any]] = []
    offsets: list[int] = []
    for member in _rows("native_members", _Member):
        if member.name is not None:
            kind = types[member.type.decode()]
            count = member.nbytes // ctypes.sizeof(kind)
            fields.append((member.name.decode(), kind * count if count > 1 else kind))
            offsets.append(member.offset)
            continue
        name = member.structure.decode()
        types[name] = made = type(name, (ctypes.Structure,), {"_fields_": fields})
        there = [getattr(made, field).offset for field, _ in fields]
        if (there, ctypes.sizeof(made)) != (offsets, member.nbytes):
            raise LinkError(f"layout.c leaves a member of struct {name} out; add it there")
        fields, offsets = [], []
    return types


def _enumeration(kind: str, *, prefix: str = "") -> Any:
    """An `enum` as an IntEnum; `prefix` is what its names begin with in C."""
    return IntEnum(kind, {n.removeprefix(prefix): v for (k, n), v in _numbers.items() if k == kind})


_numbers = {
    (row.kind.decode(), row.name.decode()): row.value for row in _rows("native_numbers", _Number)
}
CHECKSUM_BYTES = _numbers["", "HOST_CHECKSUM_BYTES"]
ENGINE_RAILS = _numbers["", "ENGINE_RAILS"]
MESSAGE_DIMENSIONS = _numbers["", "MESSAGE_DIMENSIONS"]
RING_ENTRIES = _numbers["", "RING_ENTRIES"]
RING_FAULT_BYTES = _numbers["", "RING_FAULT_BYTES"]
SPIN_MICROSECONDS = _numbers["", "HOST_SPIN_MICROSECONDS"]
TEXT_BYTES = _numbers["", "RAIL_TEXT_BYTES"]

Vendor = _enumeration("vendor")
Checksums = _enumeration("checksums")
Step = _enumeration("step", prefix="STEP_")
HostFailure = _enumeration("host_failure", prefix="HOST_")
Progress = _enumeration("progress")
HeaderState = _enumeration("header_state", prefix="HEADER_")

_structure = _structures()
CopyStep = _structure["copy_step"]
EngineOptions = _structure["engine_options"]
EntryPoints = _structure["entry_points"]
Flow = _structure["flow"]
HostGpu = _structure["host_gpu"]
MessageHeader = _structure["message_header"]
RailCounters = _structure["rail_counters"]
RingControl = _structure["ring_control"]
RingDirection = _structure["ring_direction"]
RingDoorbell = _structure["ring_doorbell"]
RingEnd = _structure["ring_end"]
RingRecord = _structure["ring_record"]
RingWord = _structure["ring_word"]
Streams = _structure["streams"]
Transfer = _structure["transfer"]
VerbsEnd = _structure["verbs_end"]
VerbsPort = _structure["verbs_port"]
VerbsRoute = _structure["verbs_route"]
