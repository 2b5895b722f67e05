"""Mirrors the structures and constants of the C headers for ctypes; a test compares them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import (
    Structure,
    c_bool,
    c_char,
    c_char_p,
    c_double,
    c_int32,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from enum import IntEnum
from typing import Any, ClassVar

CHECKSUM_BYTES = 8
"""HOST_CHECKSUM_BYTES of host.h."""
TEXT_BYTES = 256
"""RAIL_TEXT_BYTES of rail.h."""
GID_BYTES = 16
RING_ENTRIES = 256
RING_HEADER_BYTES = 104
RING_FAULT_BYTES = 1024


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
        ("user_buffers", c_uint64 * RING_ENTRIES * 2),
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
    COUNTER_LIMIT = 6
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
        ("counter_limit", c_uint64),
        ("copy", c_uint64),
        ("wait_value", c_uint64),
        ("write_value", c_uint64),
        ("record_event", c_uint64),
        ("wait_event", c_uint64),
    )

    @classmethod
    def of(
        cls, functions: Mapping[Step, Any], *, vendor: Vendor, counter_limit: int
    ) -> EntryPoints:
        """The addresses of ctypes functions, which the caller has to keep alive."""
        addresses = {
            step.name.lower(): ctypes.cast(function, c_void_p).value
            for step, function in functions.items()
        }
        return cls(vendor=vendor, counter_limit=counter_limit, **addresses)


class Streams(Structure):
    """`struct streams`."""

    _fields_ = (
        ("driver", EntryPoints),
        ("copies", c_uint64),
        ("waits", c_uint64),
        ("writes", c_uint64),
        ("join_event", c_uint64),
        ("caller_can_wait", c_bool),
        ("last_write_on_side", c_bool),
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

    OK = 0
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
        ("user_buffers", c_uint64),
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
        ("caller_stream", c_uint64),
        ("on_caller_stream", c_bool),
    )


class Progress(IntEnum):
    """`enum progress`."""

    WAITING = 0
    ENQUEUED = 1
    NEEDS_EVENT = 2
    REFUSED = 3
    FAILED = 4


class ExchangePart(Structure):
    """`struct exchange_part`."""

    _fields_ = (
        ("flow", c_uint64),
        ("address", c_uint64),
        ("nbytes", c_uint64),
        ("event", c_uint64),
        ("offset", c_uint64),
        ("count", c_uint64),
        ("progress", c_uint32),
        ("on_caller_stream", c_uint32),
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
