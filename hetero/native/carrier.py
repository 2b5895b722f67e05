"""The structures that C's carrier takes and gives, field by field (engine.h, verbs.h, tcp.h)."""

from __future__ import annotations

from ctypes import (
    POINTER,
    Structure,
    c_bool,
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

TEXT_BYTES = 256
GID_BYTES = 16


class Layout(Structure):
    """`struct engine_layout`."""

    _fields_ = (
        ("control", c_uint64),
        ("doorbell", c_uint64),
        ("out_posted", c_uint64),
        ("out_retired", c_uint64),
        ("out_produced", c_uint64),
        ("out_consumed", c_uint64),
        ("out_records", c_uint64),
        ("in_posted", c_uint64),
        ("in_retired", c_uint64),
        ("in_produced", c_uint64),
        ("in_consumed", c_uint64),
        ("in_records", c_uint64),
        ("record_bytes", c_uint64),
        ("record_nbytes", c_uint64),
        ("record_place", c_uint64),
        ("entries", c_uint64),
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
        ("control_bytes", c_uint64),
        ("record_bytes", c_uint32),
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
        ("record_bytes", c_uint32),
    )


_HANDLE, _TEXT = c_void_p, c_char_p

FUNCTIONS: dict[str, tuple[object, list[object]]] = {
    "ibverbs_load": (c_bool, [_TEXT, c_size_t]),
    "verbs_query_port": (c_bool, [c_char_p, c_uint8, POINTER(VerbsPort), _TEXT]),
    "carrier_new": (_HANDLE, [POINTER(Layout), _TEXT]),
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
    "carrier_cpu_seconds": (c_double, [_HANDLE]),
    "carrier_free": (None, [_HANDLE]),
}
"""The functions of carrier.h: the type of the result, and those of the arguments."""
