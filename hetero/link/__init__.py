"""Links: how tensors get from one rank to another. Knows nothing of pipelines or Megatron.

Here are the values of `--hetero-transport` alone, so that a command line is checked before torch
is imported.
"""

from __future__ import annotations

PATHS = ("ipc", "shm", "verbs", "verbs-host", "tcp")
"""Fastest first. `verbs` reads and writes the device's memory, `verbs-host` host memory."""

FAMILIES: dict[str, tuple[str, ...]] = {
    "auto": PATHS,
    "device-direct": ("ipc", "verbs"),
    "cpu-forward": ("shm", "verbs-host", "tcp"),
}
"""Each selects the fastest of its paths that works."""

TRANSPORTS = (*FAMILIES, *PATHS, "gloo")
"""Families, single paths, and the baseline."""
