"""The host: kernel, processors, memory, and the limits that the job's processes will have."""

from __future__ import annotations

import os
import platform
import resource
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from hetero.device.sysfs import entries, read_integer, read_text
from hetero.tools.preflight_checks.roots import Roots


@dataclass(frozen=True)
class Limits:
    """What the calling process, and so a job started the same way, may use."""

    locked_memory: int | None
    """Bytes; None for unlimited."""
    open_files: int | None
    shared_memory: int
    """Bytes that /dev/shm may hold."""
    shared_memory_free: int


@dataclass(frozen=True)
class HostFacts:
    """A node without its GPUs and NICs."""

    name: str
    kernel: str
    processor: str
    cores: int
    numa_nodes: int
    memory: int
    governors: tuple[str, ...]
    """The CPU frequency governors in use; empty where the machine does not show them."""
    numa_balancing: bool
    iommu_types: tuple[str, ...]
    """Kinds of the devices' IOMMU domains ("identity" passes through); empty without IOMMU."""
    virtual_machine: bool
    limits: Limits


def read_limits(shared_memory: str = "/dev/shm") -> Limits:
    try:
        shm = os.statvfs(shared_memory)
        total, free = shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize
    except OSError:
        total = free = 0
    return Limits(
        locked_memory=_soft_limit(resource.RLIMIT_MEMLOCK),
        open_files=_soft_limit(resource.RLIMIT_NOFILE),
        shared_memory=total,
        shared_memory_free=free,
    )


def read_host(roots: Roots, limits: Limits) -> HostFacts:
    cpu = read_text(roots.proc / "cpuinfo")
    groups = roots.sys / "kernel/iommu_groups"
    nodes = [n for n in entries(roots.sys / "devices/system/node") if n[4:].isdecimal()]
    return HostFacts(
        name=socket.gethostname(),
        kernel=read_text(roots.proc / "sys/kernel/osrelease"),
        processor=_field(cpu, "model name") or platform.machine(),
        cores=os.cpu_count() or 1,
        numa_nodes=max(1, len(nodes)),
        memory=psutil.virtual_memory().total,
        governors=_governors(roots.sys / "devices/system/cpu"),
        numa_balancing=(read_integer(roots.proc / "sys/kernel/numa_balancing") or 0) > 0,
        iommu_types=tuple(sorted({read_text(groups / n / "type") for n in entries(groups)})),
        virtual_machine="hypervisor" in _field(cpu, "flags").split(),
        limits=limits,
    )


def node_identity() -> str:
    """Equal for processes on one node, different on others: its name, kernel and network."""
    boot = read_text(Path("/proc/sys/kernel/random/boot_id"))
    return f"{socket.gethostname()} {boot} {network_namespace()}"


def network_namespace() -> str:
    """What identifies the network that this process sees, containers' own included."""
    boot = read_text(Path("/proc/sys/kernel/random/boot_id"))
    try:
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return boot


def _soft_limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _field(text: str, name: str) -> str:
    """The first value of a field of /proc/cpuinfo."""
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip() == name:
            return value.strip()
    return ""


def _governors(folder: Path) -> tuple[str, ...]:
    found = {read_text(folder / name / "cpufreq/scaling_governor") for name in entries(folder)}
    return tuple(sorted(found - {""}))
