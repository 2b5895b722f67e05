"""The GPUs: those on the bus, those that PyTorch sees, and the driver between them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hetero.device.sysfs import entries, read_text
from hetero.device.topology import PciDevice, pci_device
from hetero.plan import VENDOR_VARIABLE
from hetero.startup.identity import running_vendor
from hetero.tools.preflight_checks.pci import PcieLink, read_pcie_link
from hetero.tools.preflight_checks.roots import Roots, Tool

_VERSION = re.compile(r"\b\d{3,}\.\d+(?:\.\d+)?\b")
_VENDORS = {"0x10de": "nvidia", "0x1002": "amd"}
_DISPLAY_CLASS, _ACCELERATOR_CLASS = "0x03", "0x12"
# A display controller, as in a laptop; the others ("3D", "processing accelerator") only compute.
_VGA_CLASS = "0x0300"
VISIBILITY = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True)
class VisibleGpu:
    """A GPU as PyTorch shows it."""

    index: int
    name: str
    memory: int
    address: str | None
    """On the PCIe bus; None where PyTorch does not tell."""


@dataclass(frozen=True)
class GpuFacts:
    """One GPU that a job can use."""

    index: int
    name: str
    memory: int
    pci: PciDevice | None
    link: PcieLink


@dataclass(frozen=True)
class GpuInventory:
    """All of a node's GPUs."""

    vendor: str
    driver: str
    open_driver: bool | None
    """Whether NVIDIA's kernel modules are the open ones; None where there are none."""
    usable: tuple[GpuFacts, ...]
    on_bus: dict[str, int]
    """GPUs on the PCIe bus by vendor, those that only compute."""
    displays: dict[str, int]
    """Those that can drive a display."""
    hidden_by: str
    """The setting that hides GPUs from this process; empty where none is set."""
    simulated_by: str
    """The setting with which training here plays another vendor; empty where it is not set.

    The check is of the hardware, whatever it plays.
    """


def visible_gpus() -> list[VisibleGpu]:
    """What PyTorch sees. Needs no memory of a GPU's but starts its runtime."""
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        # Not every build tells the place on the bus, and the type stubs know none of it.
        parts = [
            getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")
        ]
        place = [part for part in parts if isinstance(part, int)]
        address = "{:04x}:{:02x}:{:02x}.0".format(*place) if len(place) == 3 else None
        found.append(VisibleGpu(index, properties.name, properties.total_memory, address))
    return found


def read_gpus(
    roots: Roots, visible: Sequence[VisibleGpu], *, vendor: str | None = None, tool: Tool
) -> GpuInventory:
    on_bus: dict[str, int] = {}
    displays: dict[str, int] = {}
    folder = roots.sys / "bus/pci/devices"
    for address in entries(folder):
        maker = _VENDORS.get(read_text(folder / address / "vendor"))
        kind = read_text(folder / address / "class")
        if maker is not None and kind[:4] in (_DISPLAY_CLASS, _ACCELERATOR_CLASS):
            counts = displays if kind.startswith(_VGA_CLASS) else on_bus
            counts[maker] = counts.get(maker, 0) + 1
    vendor = vendor or running_vendor()
    played = os.environ.get(VENDOR_VARIABLE, "").strip()
    banner = read_text(roots.proc / "driver/nvidia/version")
    return GpuInventory(
        vendor=vendor,
        driver=_driver(roots, banner, tool),
        open_driver="Open Kernel Module" in banner if banner else None,
        usable=tuple(_describe(roots, gpu) for gpu in visible),
        on_bus=on_bus,
        displays=displays,
        hidden_by=", ".join(f"{n}={os.environ[n]}" for n in VISIBILITY if n in os.environ),
        simulated_by=f"{VENDOR_VARIABLE}={played}" if played else "",
    )


def _describe(roots: Roots, gpu: VisibleGpu) -> GpuFacts:
    device = None if gpu.address is None else pci_device(gpu.address, sys_root=roots.sys)
    return GpuFacts(
        index=gpu.index,
        name=gpu.name,
        memory=gpu.memory,
        pci=device,
        link=read_pcie_link(roots, gpu.address),
    )


def _driver(roots: Roots, nvidia_banner: str, tool: Tool) -> str:
    """NVIDIA's driver or amdgpu, with its version; empty where neither is loaded."""
    if nvidia_banner:
        version = _VERSION.search(nvidia_banner)
        return f"nvidia {version.group()}" if version else "nvidia"
    if (roots.sys / "module/nvidia").is_dir():  # loaded, but /proc is another machine's or cut
        return f"nvidia {read_text(roots.sys / 'module/nvidia/version')}".strip()
    if (roots.sys / "module/amdgpu").is_dir():
        # The kernel's own amdgpu has no version beside the kernel's; AMD's package has one.
        version_text = read_text(roots.sys / "module/amdgpu/version")
        return f"amdgpu {version_text or 'of the kernel'}"
    version_text = tool(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return f"nvidia {version_text.splitlines()[0].strip()}" if version_text.strip() else ""
