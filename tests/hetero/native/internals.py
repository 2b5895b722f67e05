"""Structures and functions of the library in C that only tests use from Python."""

from __future__ import annotations

from ctypes import (
    Structure,
    c_bool,
    c_char,
    c_double,
    c_int,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any

from hetero.native.binding import RING_ENTRIES, TEXT_BYTES, native


class SendStatus(Structure):
    _fields_ = (("state", c_uint8), ("rail", c_uint8))


class Sequence(Structure):
    _fields_ = (
        ("next", c_uint32),
        ("completed", c_uint32),
        ("posted_end", c_uint32),
        ("status", SendStatus * RING_ENTRIES),
    )


class Outgoing(Structure):
    _fields_ = (
        ("records", Sequence),
        ("data", Sequence),
        ("released", c_uint32),
        ("freed", c_uint32),
    )


class RecvStatus(Structure):
    _fields_ = (
        ("state", c_uint8),
        ("rail", c_uint8),
        ("has_record", c_bool),
        ("last_byte", c_uint64),
    )


class Incoming(Structure):
    _fields_ = (
        ("posted", c_uint32),
        ("produced", c_uint32),
        ("credited", c_uint32),
        ("credit_lost", c_bool),
        ("status", RecvStatus * RING_ENTRIES),
    )


class RailOperations(Structure):
    _fields_ = (
        ("limits", c_int * 3),
        ("small_bytes", c_uint64),
        *(
            (name, c_void_p)
            for name in (
                "post_record post_data post_credit flush post_read bytes_in_flight is_busy is_late "
                "last_ack last_send poll request_notification acknowledge start stop join close"
            ).split()
        ),
    )


class Rail(Structure):
    _fields_ = (
        ("operations", c_void_p),
        ("index", c_uint8),
        ("live", c_bool),
        ("is_reading_back", c_bool),
        ("confirms_delivery", c_bool),
        ("peer_reads_back", c_bool),
        ("event_fd", c_int),
        ("in_flight", c_int * 3),
        ("bytes_in_flight", c_uint64),
        ("bytes_per_second", c_double),
        ("last_completion", c_double),
        ("bytes_sent", c_uint64),
        ("suspected_since", c_double),
        ("loss", c_char * TEXT_BYTES),
        ("may_have_ended", c_bool),
    )


STRUCTURES: dict[str, Any] = {
    "send_status": SendStatus,
    "sequence": Sequence,
    "outgoing": Outgoing,
    "recv_status": RecvStatus,
    "incoming": Incoming,
    "rail_operations": RailOperations,
    "rail": Rail,
}
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "checksum": (c_uint32, c_void_p, c_size_t),
    "checksum_portable": (c_uint32, c_void_p, c_size_t),
    "driver_copy": (c_int, c_void_p, c_uint64, c_void_p),
    "sequence_next_unsent": (c_bool, c_void_p, c_uint32, c_void_p),
    "sequence_post": (None, c_void_p, c_uint32, c_uint8),
    "sequence_complete": (None, c_void_p, c_uint32, c_uint8),
    "outgoing_credit": (c_bool, c_void_p, c_uint32),
    "outgoing_free": (c_uint32, c_void_p),
    "outgoing_retransmit": (c_int, c_void_p, c_uint8, c_bool, c_bool),
    "incoming_expects_record": (c_bool, c_void_p, c_uint32),
    "incoming_expect_data": (c_bool, c_void_p, c_uint32, c_uint8),
    "incoming_record": (None, c_void_p, c_uint32, c_uint64),
    "incoming_data": (None, c_void_p, c_uint32, c_uint8, c_bool),
    "incoming_claim_read_back": (c_bool, c_void_p, c_uint8, c_void_p),
    "incoming_read_back_completed": (None, c_void_p, c_uint8),
    "incoming_discard": (None, c_void_p, c_uint8),
    "speed_choose": (c_void_p, c_void_p, c_int, c_int, c_uint64),
    "speed_choose_small": (c_void_p, c_void_p, c_int, c_int, c_uint64, c_void_p),
    "speed_completed": (None, c_void_p, c_uint64, c_double, c_double),
    "speed_raise_idle": (None, c_void_p, c_int),
}


def internals() -> Any:
    """The library, with these functions typed too."""
    library = native()
    for name, (result, *arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
