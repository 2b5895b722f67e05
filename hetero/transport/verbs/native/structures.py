"""The structures that the forwarder in C takes and gives (engine.h and rail.h), field by field."""

from __future__ import annotations

from ctypes import (
    Structure,
    c_bool,
    c_char_p,
    c_double,
    c_int32,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
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
        ("stall_seconds", c_double),
    )


class RailRequest(Structure):
    """`struct rail_request`."""

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


class RailEnding(Structure):
    """`struct rail_ending`."""

    _fields_ = (
        ("pair", c_uint32),
        ("loop_pair", c_uint32),
        ("receiving", c_uint64),
        ("receiving_key", c_uint32),
        ("control", c_uint64),
        ("control_key", c_uint32),
        ("by_dmabuf", c_bool),
    )


class RailRoute(Structure):
    """`struct rail_route`."""

    _fields_ = (
        ("pair", c_uint32),
        ("psn", c_uint32),
        ("mtu", c_uint32),
        ("lid", c_uint16),
        ("gid", c_uint8 * GID_BYTES),
        ("gid_index", c_uint8),
        ("is_global", c_bool),
    )


class RailPeer(Structure):
    """`struct rail_peer`."""

    _fields_ = (
        ("route", RailRoute),
        ("receiving", c_uint64),
        ("receiving_key", c_uint32),
        ("control", c_uint64),
        ("control_key", c_uint32),
        ("reads_back", c_bool),
    )
