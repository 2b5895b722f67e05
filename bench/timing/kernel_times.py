"""What the kernels of a profiled step are, and how long they take."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

KINDS = {
    "attention": r"flash|fmha|sdpa|cudnn.*attention",
    "products": r"gemm|nvjet|xmma|cutlass|splitK",
    "optimizer and norms of gradients": r"multi_tensor|FusedAdam|fused_adam|foreach|lpnorm",
}
"""Patterns of kernels that every model has."""


def kernel_times(events: Sequence[dict[str, Any]], kinds_of: Mapping[str, str]) -> dict[str, Any]:
    """Of a Chrome trace: milliseconds by kind of kernel, the longest kernels, and the host's time.

    `kinds_of` are patterns of the names of kernels, of which the first that fits counts.
    """
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not kernels:
        return {"error": "the trace has no kernels of a GPU"}
    kinds: Counter[str] = Counter()
    names: Counter[str] = Counter()
    for event in kernels:
        fits = (kind for kind, words in kinds_of.items() if re.search(words, event["name"], re.I))
        kind = next(fits, "everything else")
        kinds[kind] += event["dur"]
        names[f"{kind}: {event['name'][:90]}"] += event["dur"]
    begin = min(event["ts"] for event in kernels)
    end = max(event["ts"] + event["dur"] for event in kernels)
    syncs = [e for e in events if e.get("name") == "cudaStreamSynchronize"]
    host, count = host_times(events)
    return {
        "span_ms": round((end - begin) / 1e3, 2),
        "busy_ms": round(sum(kinds.values()) / 1e3, 2),
        "stream_synchronizations": len(syncs),
        "kinds_ms": {kind: round(us / 1e3, 2) for kind, us in kinds.most_common()},
        "longest_ms": {name: round(us / 1e3, 2) for name, us in names.most_common(16)},
        "host_ms": {
            f"{name} x{count[name]}": round(us / 1e3, 2) for name, us in host.most_common(40)
        },
    }


def host_times(events: Sequence[dict[str, Any]]) -> tuple[Counter[str], Counter[str]]:
    """Of a Chrome trace: microseconds that each operation takes itself on the host, and how often.

    What lies between a thread's operations is Python's.
    """
    threads: dict[Any, list[dict[str, Any]]] = {}
    for event in events:
        if event.get("cat") in ("cpu_op", "cuda_runtime", "cuda_driver"):
            threads.setdefault(event["tid"], []).append(event)
    own: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for thread, ordered in threads.items():
        ordered.sort(key=lambda event: (event["ts"], -event["dur"]))
        open_: list[tuple[float, str]] = []
        last = ordered[0]["ts"]
        for event in ordered:
            while open_ and open_[-1][0] <= event["ts"]:
                open_.pop()
            begin, end = event["ts"], event["ts"] + event["dur"]
            if open_:
                own[open_[-1][1]] -= event["dur"]
            else:
                own[f"between operations of thread {thread}"] += max(0, begin - last)
            last = max(last, end)
            own[event["name"]] += event["dur"]
            count[event["name"]] += 1
            open_.append((end, event["name"]))
    return own, count
