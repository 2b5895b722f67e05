"""What a node has: host, software, PCIe devices, network interfaces, RDMA devices and GPUs.

The kernel's folders are `Roots`, and what is asked of the running system is `SystemFacts`, so that
a test can make both up.
"""

from __future__ import annotations

import dataclasses
import gzip
import ipaddress
import os
import platform
import re
import resource
import socket
import struct
import subprocess
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch
from packaging.requirements import InvalidRequirement, Requirement

from hetero.device.sysfs import entries, read_integer, read_text
from hetero.device.topology import (
    Distance,
    PciDevice,
    closeness,
    distance,
    parent_on_pci,
    pci_device,
    ports_between,
    rdma_devices,
)
from hetero.errors import UserError
from hetero.link.nics import libibverbs_missing
from hetero.plan import VENDOR_VARIABLE
from hetero.startup.identity import release_of, running_vendor
from hetero.version import __version__, core_version, require_supported_core, sources

_TOOL_SECONDS = 10.0

Tool = Callable[[Sequence[str]], str]
"""Runs a vendor's program and returns what it prints; empty where it is absent or fails."""


@dataclass(frozen=True)
class Roots:
    """The folders that are read."""

    sys: Path = Path("/sys")
    proc: Path = Path("/proc")
    dev: Path = Path("/dev")
    boot: Path = Path("/boot")

    @classmethod
    def below(cls, folder: Path) -> Roots:
        return cls(folder / "sys", folder / "proc", folder / "dev", folder / "boot")


def run_tool(command: Sequence[str]) -> str:
    """What a program prints; empty where it is not installed, fails, or takes too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


_FIRST_EXTENDED = 0x100
_ACCESS_CONTROL = 0x000D
_CONTROL_OFFSET = 6
_REDIRECT_REQUESTS_AND_COMPLETIONS = 0b1100


@dataclass(frozen=True)
class PcieLink:
    """How a device is attached. Zero and empty where the bus does not say."""

    lanes: int
    most_lanes: int
    speed: str

    def __str__(self) -> str:
        return f"{self.speed.removesuffix(' PCIe')} x{self.lanes}" if self.lanes else "unknown"


def read_pcie_link(roots: Roots, address: str | None) -> PcieLink:
    if address is None:
        return PcieLink(0, 0, "")
    folder = roots.sys / "bus/pci/devices" / address
    return PcieLink(
        lanes=read_integer(folder / "current_link_width") or 0,
        most_lanes=read_integer(folder / "max_link_width") or 0,
        speed=read_text(folder / "current_link_speed"),
    )


def redirects_peers(roots: Roots, port: str) -> bool | None:
    """Whether access control services of a port send traffic between devices below it upwards.

    None where the port's configuration cannot be read, which takes root.
    """
    try:
        space = (roots.sys / "bus/pci/devices" / port / "config").read_bytes()
    except OSError:
        return None
    control = _access_control(space)
    return control if control is None else bool(control & _REDIRECT_REQUESTS_AND_COMPLETIONS)


def _access_control(space: bytes) -> int | None:
    """The access control register; 0 where the port has none, None where the space is cut off."""
    if len(space) <= _FIRST_EXTENDED:
        return None
    offset, seen = _FIRST_EXTENDED, set[int]()
    while offset >= _FIRST_EXTENDED and offset not in seen and offset + 8 <= len(space):
        seen.add(offset)
        (header,) = struct.unpack_from("<I", space, offset)
        if header & 0xFFFF == _ACCESS_CONTROL:
            (control,) = struct.unpack_from("<H", space, offset + _CONTROL_OFFSET)
            return int(control)
        offset = header >> 20 & 0xFFC
    return 0


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


_ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class SoftwareFacts:
    """Versions; empty where something is not there."""

    project: str
    python: str
    torch: str
    """The release alone, as in 2.12.1: what the nodes must share."""
    torch_build: str
    """What it was built for, as in cu130, rocm7.1 or cpu."""
    cuda: str
    rocm: str
    collectives: str
    """NCCL or RCCL and its version, as PyTorch was built with it."""
    megatron_core: str
    unmet: tuple[str, ...]
    """Requirements that this environment does not fulfil, and what it has instead."""
    another_core: str = ""
    """What is wrong where megatron.core is imported from elsewhere than pip's."""


def read_software() -> SoftwareFacts:
    build = str(torch.__version__).partition("+")[2]
    rocm, cuda = torch.version.hip or "", torch.version.cuda or ""
    return SoftwareFacts(
        project=f"{__version__} ({sources()})",
        python=platform.python_version(),
        torch=release_of(str(torch.__version__)),
        torch_build=build or (f"rocm{rocm}" if rocm else f"cu{cuda}" if cuda else "cpu"),
        cuda=cuda,
        rocm=rocm,
        collectives=_collectives(rocm, cuda),
        megatron_core=_core_version(),
        unmet=unmet_requirements(own_requirements()),
        another_core=_another_core(),
    )


def own_requirements() -> list[str]:
    """What this project requires: by the checkout's file, or as the installed package says.

    A checkout may be newer than what was installed from it.
    """
    if (_ROOT / "setup.py").is_file():
        return (_ROOT / "requirements.txt").read_text().splitlines()
    return metadata.requires("hetero-megatron") or []


def unmet_requirements(lines: Iterable[str]) -> tuple[str, ...]:
    """The requirements that the running environment does not fulfil."""
    unmet = []
    for line in lines:
        try:
            wanted = Requirement(line.split("#", 1)[0].strip())
        except InvalidRequirement:  # a comment, an empty line or an option of pip's
            continue
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        version = _installed(wanted.name)
        if not version:
            unmet.append(f"{wanted} is not installed")
        elif not wanted.specifier.contains(version, prereleases=True):
            unmet.append(f"{wanted} is wanted and {version} installed")
    return tuple(unmet)


def _core_version() -> str:
    try:
        return core_version()
    except UserError:
        return ""


def _another_core() -> str:
    """What is wrong where another megatron-core is imported than the one that pip has installed."""
    try:
        require_supported_core()
    except UserError as error:
        return str(error) if _core_version() != _installed("megatron-core") else ""
    return ""


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _collectives(rocm: str, cuda: str) -> str:
    if not (rocm or cuda):
        return ""
    try:
        version = torch.cuda.nccl.version()
    except (AttributeError, RuntimeError):  # a build without the library
        return ""
    return ("RCCL " if rocm else "NCCL ") + ".".join(map(str, version))


_LOOPBACK = 772
"""ARPHRD_LOOPBACK of Linux."""


@dataclass(frozen=True)
class InterfaceFacts:
    """One network interface."""

    name: str
    state: str
    speed: int | None
    """Megabits per second; None where the driver does not say or the link is down."""
    mtu: int | None
    addresses: tuple[str, ...]
    """IPv4 first."""
    pci: PciDevice | None
    kind: str
    """physical where a device carries it, loopback, bridge, or virtual: bonds, VLANs, tunnels."""

    @property
    def is_up(self) -> bool:
        return self.state == "up"

    @property
    def address(self) -> str | None:
        return next(iter(self.addresses), None)


def live_addresses() -> dict[str, list[str]]:
    """The IP addresses of every interface, IPv4 before IPv6, without link-local IPv6 ones."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [
            entry.address
            for family in families
            for entry in addresses
            if entry.family == family and not entry.address.startswith("fe80")
        ]
        for name, addresses in psutil.net_if_addrs().items()
    }


def read_interfaces(
    roots: Roots, addresses: Mapping[str, Sequence[str]]
) -> tuple[InterfaceFacts, ...]:
    """All interfaces; loopback is up although the kernel calls its state unknown."""
    found = []
    for name in entries(roots.sys / "class/net"):
        folder = roots.sys / "class/net" / name
        state = read_text(folder / "operstate") or "unknown"
        if name == "lo" and state == "unknown":
            state = "up"
        found.append(
            InterfaceFacts(
                name=name,
                state=state,
                speed=read_integer(folder / "speed") or None,
                mtu=read_integer(folder / "mtu"),
                addresses=tuple(addresses.get(name, ())),
                pci=parent_on_pci(folder),
                kind=_kind(folder),
            )
        )
    return tuple(found)


def _kind(folder: Path) -> str:
    if (folder / "device").exists():
        return "physical"
    if read_integer(folder / "type") == _LOOPBACK:
        return "loopback"
    return "bridge" if (folder / "bridge").is_dir() else "virtual"


# Packets on the wire carry up to 60 bytes of headers beside the payload (RoCE v2 over IPv6).
_ROCE_HEADERS = 60
_PACKET_SIZES = (4096, 2048, 1024, 512, 256)
_NO_ADDRESS = ipaddress.IPv6Address(0)
_RATE = re.compile(r"[0-9]+(\.[0-9]+)?")


@dataclass(frozen=True)
class RdmaPort:
    """One port of an RDMA device."""

    number: int
    state: str
    link_layer: str
    rate: float
    """Gigabits per second."""
    interface: str | None
    roce_addresses: tuple[str, ...]
    """Its RoCE v2 addresses: IPv4 where mapped, link-local ones left out."""
    packet_bytes: int | None
    """The largest payload of a packet; None where it cannot be told."""

    @property
    def is_active(self) -> bool:
        return self.state == "ACTIVE"

    @property
    def on_ethernet(self) -> bool:
        return self.link_layer == "Ethernet"


@dataclass(frozen=True)
class RdmaFacts:
    """One RDMA device."""

    name: str
    model: str
    firmware: str
    pci: PciDevice | None
    link: PcieLink
    ports: tuple[RdmaPort, ...]

    @property
    def active_ports(self) -> tuple[RdmaPort, ...]:
        return tuple(port for port in self.ports if port.is_active)

    @property
    def rate(self) -> float:
        """Of its fastest active port, in Gb/s; 0 where none is active."""
        return max((port.rate for port in self.active_ports), default=0.0)


def read_rdma(
    roots: Roots, interfaces: Sequence[InterfaceFacts], *, tool: Tool
) -> tuple[RdmaFacts, ...]:
    """All RDMA devices. `ibv_devinfo` is asked for what sysfs does not have: InfiniBand's MTU."""
    devices = rdma_devices(sys_root=roots.sys)
    told = _devinfo_packets(tool(["ibv_devinfo"])) if devices else {}
    mtus = {interface.name: interface.mtu for interface in interfaces}
    found = []
    for device in devices:
        folder = roots.sys / "class/infiniband" / device.name
        ports = []
        for number in entries(folder / "ports"):
            port = _read_port(folder / "ports" / number, int(number), device.interfaces)
            packet = told.get((device.name, port.number))
            if packet is None and port.on_ethernet and port.interface in mtus:
                packet = _packet_for_mtu(mtus[port.interface])
            ports.append(replace(port, packet_bytes=packet))
        address = device.pci.address if device.pci else None
        found.append(
            RdmaFacts(
                name=device.name,
                model=read_text(folder / "hca_type"),
                firmware=read_text(folder / "fw_ver"),
                pci=device.pci,
                link=read_pcie_link(roots, address),
                ports=tuple(ports),
            )
        )
    return tuple(found)


def _read_port(folder: Path, number: int, interfaces: Sequence[str]) -> RdmaPort:
    rate = _RATE.match(read_text(folder / "rate"))
    addresses, named = _roce_addresses(folder)
    beside = interfaces[number - 1] if len(interfaces) >= number else None
    return RdmaPort(
        number=number,
        state=read_text(folder / "state").partition(":")[2].strip() or "unknown",
        link_layer=read_text(folder / "link_layer"),
        rate=float(rate.group()) if rate else 0.0,
        interface=named or beside,
        roce_addresses=addresses,
        packet_bytes=None,
    )


def _roce_addresses(port: Path) -> tuple[tuple[str, ...], str | None]:
    """The port's RoCE v2 addresses, and the interface that they belong to."""
    found: list[str] = []
    interface = None
    for index in entries(port / "gids"):
        if read_text(port / "gid_attrs/types" / index) != "RoCE v2":
            continue
        try:
            address = ipaddress.IPv6Address(read_text(port / "gids" / index))
        except ValueError:
            continue
        interface = interface or read_text(port / "gid_attrs/ndevs" / index) or None
        if address != _NO_ADDRESS and not address.is_link_local:
            found.append(str(address.ipv4_mapped or address))
    return tuple(found), interface


def _packet_for_mtu(mtu: int | None) -> int | None:
    return next((s for s in _PACKET_SIZES if mtu is not None and s + _ROCE_HEADERS <= mtu), None)


def _devinfo_packets(text: str) -> dict[tuple[str, int], int]:
    """Active MTU by device and port, from what `ibv_devinfo` prints."""
    found: dict[tuple[str, int], int] = {}
    device, port = "", 0
    for line in text.splitlines():
        key, _, value = line.strip().partition(":")
        value = value.strip()
        if key == "hca_id":
            device = value
        elif key == "port" and value.isdecimal():
            port = int(value)
        elif key == "active_mtu" and value.split(" ")[0].isdecimal():
            found[device, port] = int(value.split(" ")[0])
    return found


_VERSION = re.compile(r"\b\d{3,}\.\d+(?:\.\d+)?\b")
_VENDORS = {"0x10de": "nvidia", "0x1002": "amd"}
_DISPLAY_CLASS, _ACCELERATOR_CLASS = "0x03", "0x12"
# A display controller, as in a laptop; the others ("3D", "processing accelerator") only compute.
_VGA_CLASS = "0x0300"
VISIBILITY = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True)
class GpuFacts:
    """One GPU that a job can use."""

    index: int
    name: str
    memory: int
    address: str | None = None
    """On the PCIe bus; None where PyTorch does not tell."""
    pci: PciDevice | None = None
    link: PcieLink = PcieLink(0, 0, "")


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


def visible_gpus() -> list[GpuFacts]:
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
        found.append(GpuFacts(index, properties.name, properties.total_memory, address))
    return found


def read_gpus(
    roots: Roots, visible: Sequence[GpuFacts], *, vendor: str | None = None, tool: Tool
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
        usable=tuple(_placed(roots, gpu) for gpu in visible),
        on_bus=on_bus,
        displays=displays,
        hidden_by=", ".join(f"{n}={os.environ[n]}" for n in VISIBILITY if n in os.environ),
        simulated_by=f"{VENDOR_VARIABLE}={played}" if played else "",
    )


def _placed(roots: Roots, gpu: GpuFacts) -> GpuFacts:
    device = None if gpu.address is None else pci_device(gpu.address, sys_root=roots.sys)
    return replace(gpu, pci=device, link=read_pcie_link(roots, gpu.address))


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


# A NIC that is slower than this share of the fastest serves management, not training.
_FAST_ENOUGH = 0.5


@dataclass(frozen=True)
class Nic:
    """A NIC that could be a rail: its interface, and its RDMA device where it has one."""

    name: str
    """Of the network interface, or of the RDMA device where that has no interface."""
    rdma: str | None
    address: str | None
    """IPv4 where it has one."""
    pci: PciDevice | None
    rate: float
    """Gb/s; 0 where not told."""


@dataclass(frozen=True)
class Rail:
    """The NIC recommended for one GPU."""

    gpu: int
    nic: Nic
    distance: Distance


def candidates(interfaces: Sequence[InterfaceFacts], rdma: Sequence[RdmaFacts]) -> tuple[Nic, ...]:
    """The NICs fit for training: RDMA devices with an active port, else the fast interfaces."""
    by_name = {interface.name: interface for interface in interfaces}
    nics = [
        Nic(
            name=port.interface or device.name,
            rdma=device.name,
            address=by_name[port.interface].address if port.interface in by_name else None,
            pci=device.pci,
            rate=port.rate,
        )
        for device in rdma
        for port in device.active_ports
    ]
    nics = nics or _interfaces(interfaces)
    fastest = max((nic.rate for nic in nics), default=0.0)
    return tuple(nic for nic in nics if nic.rate >= fastest * _FAST_ENOUGH)


def _interfaces(interfaces: Sequence[InterfaceFacts]) -> list[Nic]:
    """Physical interfaces; virtual ones where they are faster, as a bond is, or all there is.

    Not those with a link-local address (169.254), which leads to a host's own management.
    """
    nics: dict[str, list[Nic]] = {"physical": [], "virtual": []}
    for i in interfaces:
        if i.kind not in nics or not i.is_up or i.address is None:
            continue
        if not ipaddress.ip_address(i.address).is_link_local:
            nics[i.kind].append(Nic(i.name, None, i.address, i.pci, (i.speed or 0) / 1000))
    fastest = {kind: max((nic.rate for nic in found), default=-1.0) for kind, found in nics.items()}
    return nics["virtual" if fastest["virtual"] > fastest["physical"] else "physical"]


def recommend(gpus: Sequence[GpuFacts], nics: Sequence[Nic]) -> tuple[Rail, ...]:
    """For each GPU the nearest NIC, and among equally near ones the least used so far."""
    used = dict.fromkeys((nic.name for nic in nics), 0)
    rails = []
    for gpu in gpus if nics else ():
        best = min(nics, key=lambda nic: (*closeness(gpu.pci, nic.pci), used[nic.name]))
        used[best.name] += 1
        rails.append(Rail(gpu=gpu.index, nic=best, distance=distance(gpu.pci, best.pci)))
    return tuple(rails)


@dataclass(frozen=True)
class SystemFacts:
    """What is asked of the running system and not of a file; a test makes it up."""

    software: SoftwareFacts
    gpus: Sequence[GpuFacts]
    """As PyTorch shows them: without their place on the bus and their link."""
    addresses: Mapping[str, Sequence[str]]
    limits: Limits
    libibverbs: Libibverbs
    vendor: str | None = None
    """None for that of the running PyTorch."""
    tool: Tool = field(default=run_tool)

    @classmethod
    def here(cls) -> SystemFacts:
        return cls(
            software=read_software(),
            gpus=visible_gpus(),
            addresses=live_addresses(),
            limits=read_limits(),
            libibverbs=read_libibverbs(),
        )


@dataclass(frozen=True)
class NodeFacts:
    """One node."""

    host: HostFacts
    software: SoftwareFacts
    gpus: GpuInventory
    interfaces: tuple[InterfaceFacts, ...]
    rdma: tuple[RdmaFacts, ...]
    nics: tuple[Nic, ...]
    """Those fit for training."""
    rails: tuple[Rail, ...]
    """The NIC recommended for each GPU."""
    gpudirect: GpuDirectFacts

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def recommended_nics(self) -> tuple[str, ...]:
        """What to pass to --hetero-nics on this node: each GPU's NIC, or all that are fit."""
        names = [rail.nic.name for rail in self.rails] or [nic.name for nic in self.nics]
        return tuple(dict.fromkeys(names))


def read_node(roots: Roots, system: SystemFacts) -> NodeFacts:
    host = read_host(roots, system.limits)
    gpus = read_gpus(roots, system.gpus, vendor=system.vendor, tool=system.tool)
    interfaces = read_interfaces(roots, system.addresses)
    rdma = read_rdma(roots, interfaces, tool=system.tool)
    nics = candidates(interfaces, rdma)
    rails = recommend(gpus.usable, nics)
    places = {gpu.index: gpu.pci for gpu in gpus.usable}
    pairs = [
        (gpu, rail.nic.pci)
        for rail in rails
        if rail.distance is Distance.SAME_SWITCH
        and (gpu := places[rail.gpu]) is not None
        and rail.nic.pci is not None
    ]
    return NodeFacts(
        host=host,
        software=system.software,
        gpus=gpus,
        interfaces=interfaces,
        rdma=rdma,
        nics=nics,
        rails=rails,
        gpudirect=read_gpudirect(
            roots, kernel=host.kernel, libibverbs=system.libibverbs, pairs=pairs
        ),
    )
