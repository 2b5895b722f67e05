"""Loads the C library and declares its functions for ctypes."""

from __future__ import annotations

import ctypes
import zlib
from ctypes import (
    POINTER,
    c_bool,
    c_char_p,
    c_double,
    c_int,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from hetero.errors import LinkError
from hetero.native.structures import (
    EngineOptions,
    EntryPoints,
    Flow,
    HostGpu,
    TcpRequest,
    VerbsConnectionInfo,
    VerbsPeer,
    VerbsPort,
    VerbsRequest,
    VerbsRoute,
)

FOLDER = Path(__file__).parent
_REMEDY = "install this project again (pip install -e .)"
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
    "carrier_set_device_notifies": (None, [_HANDLE]),
    "carrier_progress": (None, [_HANDLE]),
    "carrier_loss_fd": (c_int, [_HANDLE]),
    "carrier_async_fd": (c_int, [_HANDLE, c_int]),
    "carrier_handle_async_event": (c_bool, [_HANDLE, c_int, _TEXT]),
    "carrier_next_loss": (c_int, [_HANDLE, _TEXT]),
    "carrier_stop_rail": (None, [_HANDLE, c_int]),
    "carrier_retransmit": (c_int, [_HANDLE, c_int]),
    "carrier_drain": (c_bool, [_HANDLE, c_double]),
    "carrier_flush_credits": (c_bool, [_HANDLE, c_double]),
    "carrier_free": (None, [_HANDLE]),
    "host_stream_create": (c_void_p, [POINTER(HostGpu)]),
    "host_stream_failure": (c_uint32, [c_void_p]),
    "host_stream_notify": (None, [c_void_p, c_void_p, c_void_p]),
    "host_stream_destroy": (None, [c_void_p]),
    "host_stream_synchronize": (c_bool, [c_void_p, c_uint32]),
    "host_wait_word": (c_bool, [c_void_p, c_uint32, c_uint32]),
    "host_read_word": (c_uint32, [c_void_p]),
    "host_write_word": (None, [c_void_p, c_uint32]),
    "host_ring_doorbell": (None, [c_void_p]),
    "host_wait_doorbell": (None, [c_void_p, c_uint32, c_uint32]),
    "native_wait_value": (c_uint64, [POINTER(EntryPoints), c_uint64, c_uint64, c_uint32]),
    "native_write_value": (c_uint64, [POINTER(EntryPoints), c_uint64, c_uint64, c_uint32]),
    "native_spin": (None, [c_void_p, c_uint32, c_void_p, c_uint32, c_uint32]),
    "native_progress": (
        c_uint32,
        [POINTER(Flow), c_char_p, *(c_uint64,) * 4, c_bool, c_uint64, c_bool],
    ),
    "native_exchange": (c_uint32, [c_void_p, c_uint32, c_uint64, c_uint32, c_bool]),
}
"""Each function's result type and argument types."""


@cache
def native(path: Path | None = None) -> ctypes.CDLL:
    """The library, with typed functions. Calls release the GIL.

    Raises LinkError, with the remedy, if it is not built or cannot be loaded. `path` is for tests.
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
    """The version that a library built from the sources here would have; None without sources.

    In an editable install the library beside them may be older. Python would then read its
    structures wrongly, and a link would hang.
    """
    content = b"".join(path.read_bytes() for path in sorted(FOLDER.glob("*.[ch]")))
    return zlib.crc32(content) if content else None
