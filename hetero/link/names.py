"""The values of `--hetero-transport`. Imports nothing, so that any tool can import it."""

from __future__ import annotations

PATHS = ("ipc", "shm", "verbs", "verbs-host", "tcp")
"""Fastest first. `verbs` reads and writes the device's memory, `verbs-host` host memory."""

FAMILIES: dict[str, tuple[str, ...]] = {
    "auto": PATHS,
    "device-direct": ("ipc", "verbs"),
    "cpu-forward": ("shm", "verbs-host", "tcp"),
}
"""Each selects the fastest of its paths that works."""

TRANSPORTS = (*FAMILIES, *PATHS, "gloo", "nccl")
"""Families, then single paths, then the baselines."""
