"""What ranks compare of a call."""

from __future__ import annotations

import tracemalloc

from hetero.collectives.calls import Call


def test_calls_of_ever_new_shapes_take_no_memory() -> None:
    """As of a script whose batches all have other lengths."""
    tracemalloc.start()
    try:
        for length in range(2_000):
            _ = Call(length, "all_reduce", "float32", (length,), "SUM").tag
        before, _ = tracemalloc.get_traced_memory()
        for length in range(2_000, 20_000):
            _ = Call(length, "all_reduce", "float32", (length,), "SUM").tag
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 1 << 20
