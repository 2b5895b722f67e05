"""What a user may ask for as `--hetero-transport`. Knows no library, so that any tool may ask."""

from __future__ import annotations

PATHS = ("ipc", "shm", "verbs", "verbs-host", "tcp")
"""Fastest first. `verbs` moves the device's own memory, `verbs-host` goes through host memory."""

FAMILIES: dict[str, tuple[str, ...]] = {
    "auto": PATHS,
    "device-direct": ("ipc", "verbs"),
    "cpu-forward": ("shm", "verbs-host", "tcp"),
}
"""What may be asked for instead of one path: the fastest of these that works."""

TRANSPORTS = (*FAMILIES, *PATHS, "gloo", "nccl")
"""Families, then single paths, then the baselines."""
