"""The structures and numbers that Python and C share, as the C headers declare them."""

from __future__ import annotations

from hetero.native.headers import constant, enumeration, structure

CHECKSUM_BYTES = constant("HOST_CHECKSUM_BYTES")
SPIN_MICROSECONDS = constant("HOST_SPIN_MICROSECONDS")
TEXT_BYTES = constant("RAIL_TEXT_BYTES")
RING_ENTRIES = constant("RING_ENTRIES")
RING_FAULT_BYTES = constant("RING_FAULT_BYTES")

RingWord = structure("ring_word")
RingRecord = structure("ring_record")
RingDirection = structure("ring_direction")
RingEnd = structure("ring_end")
RingControl = structure("ring_control")
EntryPoints = structure("entry_points")
Streams = structure("streams")
Flow = structure("flow")
Transfer = structure("transfer")
CopyStep = structure("copy_step")
HostGpu = structure("host_gpu")
EngineOptions = structure("engine_options")
VerbsEnd = structure("verbs_end")
VerbsRoute = structure("verbs_route")
VerbsPort = structure("verbs_port")

Vendor = enumeration("vendor")
Step = enumeration("step", prefix="STEP_")
HostFailure = enumeration("host_failure", prefix="HOST_")
Progress = enumeration("progress")
HeaderState = enumeration("header_state", prefix="HEADER_")
