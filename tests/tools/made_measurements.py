"""A run of three steady iterations, as `measure` would have read it."""

from __future__ import annotations

from bench.reproduction.measurement import Measurement

MEASURED = Measurement(
    tokens_per_s=(1000.0, 1010.0, 990.0),
    tflops=(500.0, 505.0, 495.0),
    tflops_full_square=(530.0, 535.0, 525.0),
    losses=(9.0, 8.0, 7.0, 6.0),
    peak_memory_bytes=(90 << 30, 70 << 30),
    data_wait_share=0.0004,
    data_wait_longest_ms=2.0,
    boundary_bytes=0,
    transport="nccl",
    device="NVIDIA H200",
    actual_vendor="nvidia",
    simulated=False,
)
