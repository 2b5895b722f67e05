"""What a NIC needs to reach GPU memory: kernel modules, kernel options, libibverbs, permissions."""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero.device.sysfs import entries, read_text
from hetero.device.topology import PciDevice, ports_between
from hetero.link.nics import libibverbs_missing
from hetero.tools.preflight_checks.pci import redirects_peers
from hetero.tools.preflight_checks.roots import Roots

KERNEL_OPTIONS = ("CONFIG_DMABUF_MOVE_NOTIFY", "CONFIG_PCI_P2PDMA", "CONFIG_HSA_AMD_P2P")
_PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")
_LIBRARY = re.compile(r"libibverbs\.so\.\d+\.\d+\.(\d+)\.\d+")


@dataclass(frozen=True)
class Libibverbs:
    """Whether the library that drives RDMA devices can be used, and if not, why."""

    usable: bool
    release: str
    """rdma-core's release, as in 44; empty where it cannot be told."""
    reason: str


@dataclass(frozen=True)
class GpuDirectFacts:
    """What there is of device-direct transfers' conditions."""

    peer_modules: tuple[str, ...]
    """Loaded modules that register GPU memory by its pointer."""
    kernel_options: dict[str, bool | None]
    """None where the kernel's configuration cannot be read."""
    libibverbs: Libibverbs
    verbs_files: tuple[str, ...]
    """The device files of RDMA devices in /dev/infiniband."""
    forbidden_files: tuple[str, ...]
    """Those of them that this user may not open for reading and writing."""
    redirecting_ports: tuple[str, ...]
    """Switch ports between a GPU and its NIC that send their traffic up to the CPU."""
    unread_ports: tuple[str, ...]
    """Such ports whose configuration this user may not read."""


def read_libibverbs() -> Libibverbs:
    """Try to load it, as the verbs transport does."""
    if (reason := libibverbs_missing()) is not None:
        return Libibverbs(usable=False, release="", reason=reason)
    mapped = _LIBRARY.search(read_text(Path("/proc/self/maps")))
    return Libibverbs(usable=True, release=mapped.group(1) if mapped else "", reason="")


def read_gpudirect(
    roots: Roots,
    *,
    kernel: str,
    libibverbs: Libibverbs,
    pairs: Sequence[tuple[PciDevice, PciDevice]],
) -> GpuDirectFacts:
    """`pairs` are GPUs and NICs below one switch, whose traffic need not pass the CPU."""
    files = [name for name in entries(roots.dev / "infiniband") if name.startswith("uverbs")]
    access = {name: os.access(roots.dev / "infiniband" / name, os.R_OK | os.W_OK) for name in files}
    redirect = {
        port: redirects_peers(roots, port) for gpu, nic in pairs for port in ports_between(gpu, nic)
    }
    return GpuDirectFacts(
        peer_modules=_peer_modules(roots),
        kernel_options=read_kernel_options(roots, kernel),
        libibverbs=libibverbs,
        verbs_files=tuple(files),
        forbidden_files=tuple(name for name, allowed in access.items() if not allowed),
        redirecting_ports=tuple(sorted(port for port, value in redirect.items() if value)),
        unread_ports=tuple(sorted(port for port, value in redirect.items() if value is None)),
    )


def _peer_modules(roots: Roots) -> tuple[str, ...]:
    loaded = [name for name in _PEER_MODULES if (roots.sys / "module" / name).is_dir()]
    # AMD's driver package registers itself here where the RDMA stack has the interface for it.
    if (roots.sys / "kernel/mm/memory_peers/amdkfd").is_dir():
        loaded.append("amdkfd")
    return tuple(loaded)


def read_kernel_options(roots: Roots, kernel: str) -> dict[str, bool | None]:
    """Whether each option that dma-buf between GPU and NIC needs is built in."""
    text = read_text(roots.boot / f"config-{kernel}")
    if not text:
        try:
            text = gzip.decompress((roots.proc / "config.gz").read_bytes()).decode()
        except (OSError, EOFError, zlib.error):
            return dict.fromkeys(KERNEL_OPTIONS)
    lines = set(text.splitlines())
    return {name: f"{name}=y" in lines for name in KERNEL_OPTIONS}
