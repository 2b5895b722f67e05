"""How much memory a node has left for files in memory."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(folder: Path) -> int:
    """What can still be written to a folder in memory: the least of three limits.

    Those of its file system, of the host, and of this container, where cgroup 2 shows one.
    """
    status = os.statvfs(folder)
    free = min(status.f_bavail * status.f_frsize, psutil.virtual_memory().available)
    container = _free_in_container(_CGROUP)
    return free if container is None else min(free, container)


def _free_in_container(cgroup: Path) -> int | None:
    with suppress(OSError, ValueError):
        limit = int((cgroup / "memory.max").read_text())  # "max" without one
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(stat.get("inactive_file", 0)))
    return None


def held_bytes(folder: Path) -> int:
    """The bytes of the files under a folder; a file with several names counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                status = os.lstat(os.path.join(path, name))
                sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())
