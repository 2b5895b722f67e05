"""Three made-up machines: files as their kernels would show them, and what PyTorch would say."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from pathlib import Path

from hetero.device.topology import rdma_devices
from hetero.tools.preflight_checks.facts import (
    GpuFacts,
    Libibverbs,
    Limits,
    NodeFacts,
    Roots,
    SoftwareFacts,
    SystemFacts,
    read_node,
)
from tests.hetero.device.fake_sysfs import CONNECTX7, H200, MI325X, THOR2, FakeSysfs

GIB = 1 << 30
PROPRIETARY = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Wed Feb 26 02:10:27 UTC 2025"
)
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (root)"
# Of each GPU's root complex; four on either socket.
COMPLEXES = (0x15, 0x26, 0x37, 0x48, 0x97, 0xA7, 0xB7, 0xC7)

NO_GPU = SoftwareFacts(
    project="0.1.0",
    python="3.11.7",
    torch="2.12.1",
    torch_build="cpu",
    cuda="",
    rocm="",
    collectives="",
    megatron_core="0.16.1",
    unmet=(),
)
CUDA = replace(NO_GPU, torch_build="cu130", cuda="13.0", collectives="NCCL 2.28.9")
ROCM = replace(NO_GPU, torch_build="rocm7.1", rocm="7.1", collectives="RCCL 2.27.7")
AMPLE = Limits(
    locked_memory=None, open_files=1 << 20, shared_memory=512 * GIB, shared_memory_free=511 * GIB
)


@dataclass
class Machine:
    """A tree of files below a folder, and what the running system would add."""

    folder: Path
    system: SystemFacts

    @property
    def roots(self) -> Roots:
        return Roots.below(self.folder)

    @property
    def sysfs(self) -> FakeSysfs:
        return FakeSysfs(self.folder / "sys")

    def write(self, path: str, text: str) -> None:
        """A file of the machine: proc/cmdline, dev/infiniband/uverbs0."""
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def load_module(self, name: str) -> None:
        (self.folder / "sys/module" / name).mkdir(parents=True)

    def change(self, **facts: object) -> None:
        """Change what the running system says."""
        self.system = replace(self.system, **facts)  # type: ignore[arg-type]

    def read(self) -> NodeFacts:
        return read_node(self.roots, self.system)

    def port_file(self, device: str, name: str) -> Path:
        return self.folder / "sys/class/infiniband" / device / "ports/1" / name


def mapped(address: str) -> str:
    """The GID of an IPv4 address, as sysfs writes it."""
    numbers = [int(part) for part in address.split(".")]
    return f"0000:0000:0000:0000:0000:ffff:{numbers[0]:02x}{numbers[1]:02x}:" + (
        f"{numbers[2]:02x}{numbers[3]:02x}"
    )


def config_space(access_control: int) -> bytes:
    """The configuration of a switch port: an error capability, then access control services."""
    space = bytearray(4096)
    struct.pack_into("<I", space, 0x100, 0x148 << 20 | 1 << 16 | 0x0001)
    struct.pack_into("<IHH", space, 0x148, 1 << 16 | 0x000D, 0x5F, access_control)
    return bytes(space)


def _roce_node(
    folder: Path, *, gpu: dict[str, str], nic: dict[str, str], names: tuple[str, str], driver: str
) -> tuple[Machine, list[GpuFacts], dict[str, list[str]]]:
    """Eight GPUs, each with a RoCE NIC below its own switch, and a slow NIC for management."""
    machine = Machine(folder, system=SystemFacts(NO_GPU, [], {}, AMPLE, Libibverbs(True, "50", "")))
    tree = machine.sysfs
    gpus, addresses = [], {"lo": ["127.0.0.1"], "mgmt0": ["192.168.1.10"]}
    tree.add_interface("lo", None, state="unknown", mtu=65536, kind=772)
    board = tree.add_pci("pci0000:00/0000:00:1c.0/0000:02:00.0", CONNECTX7, numa_node=0)
    tree.add_interface("mgmt0", board, speed=10000)
    for index, bus in enumerate(COMPLEXES):
        switch = f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0"
        places = [f"{switch}/0000:{bus + 2:02x}:0{port}.0" for port in range(2)]
        node, pcie = index // 4, {"current_link_width": "16", "max_link_width": "16"}
        pcie["current_link_speed"] = "32.0 GT/s PCIe"
        place = tree.add_pci(
            f"{places[0]}/0000:{bus + 3:02x}:00.0", gpu | pcie, numa_node=node, driver=driver
        )
        gpus.append(GpuFacts(index, "made-up GPU", 141 * GIB, place.name))
        place = tree.add_pci(f"{places[1]}/0000:{bus + 4:02x}:00.0", nic | pcie, numa_node=node)
        device, interface = names[0].format(index), names[1].format(index)
        address = f"10.0.{index}.1"
        addresses[interface] = [address]
        tree.add_interface(interface, place, speed=400000, mtu=9000)
        link_local = "fe80:0000:0000:0000:0ac0:ebff:fe12:3456"
        gids = (
            (link_local, "IB/RoCE v1", interface),
            (link_local, "RoCE v2", interface),
            (mapped(address), "IB/RoCE v1", interface),
            (mapped(address), "RoCE v2", interface),
        )
        tree.add_rdma(device, place, gids=gids)
        machine.write(f"dev/infiniband/uverbs{index}", "")
        for port in places:
            config = tree.root / "bus/pci/devices" / port.rsplit("/", 1)[1] / "config"
            config.write_bytes(config_space(access_control=0))
    for number in range(2):
        tree.write(f"devices/system/node/node{number}/numastat", "")
        tree.write(f"devices/system/cpu/cpu{number}/cpufreq/scaling_governor", "performance")
    machine.write("proc/cpuinfo", "processor\t: 0\nmodel name\t: Made-up 9654\nflags\t\t: fpu sse2")
    machine.write("proc/sys/kernel/osrelease", "6.8.0-60-generic")
    machine.write("proc/sys/kernel/numa_balancing", "0")
    return machine, gpus, addresses


def h200_node(folder: Path) -> Machine:
    """8x H200 and 8 NICs of 400 Gb/s; the fourth NIC is down and nvidia_peermem not loaded."""
    machine, gpus, addresses = _roce_node(
        folder, gpu=H200, nic=CONNECTX7, names=("mlx5_{}", "ens{}np0"), driver="nvidia"
    )
    machine.write("proc/driver/nvidia/version", PROPRIETARY)
    named = [replace(gpu, name="NVIDIA H200") for gpu in gpus]
    addresses["ens3np0"] = []
    down = machine.folder / "sys/class/net/ens3np0"
    (down / "operstate").write_text("down\n")
    (down / "speed").write_text("-1\n")
    machine.port_file("mlx5_3", "state").write_text("1: DOWN\n")
    machine.port_file("mlx5_3", "phys_state").write_text("3: Disabled\n")
    for index in (2, 3):  # An interface that is down has only its link-local addresses.
        machine.port_file("mlx5_3", f"gids/{index}").write_text(":".join(["0000"] * 8) + "\n")
    machine.change(software=CUDA, gpus=named, addresses=addresses, vendor="nvidia")
    return machine


def mi325x_node(folder: Path) -> Machine:
    """8x MI325X and 8 RoCE NICs; a kernel with all that dma-buf needs. Nothing is amiss."""
    machine, gpus, addresses = _roce_node(
        folder, gpu=MI325X, nic=THOR2, names=("bnxt_re{}", "eth{}"), driver="amdgpu"
    )
    machine.load_module("amdgpu")
    machine.write("sys/module/amdgpu/version", "6.16.6")
    machine.write(
        "boot/config-6.8.0-60-generic",
        "CONFIG_PCI_P2PDMA=y\nCONFIG_DMABUF_MOVE_NOTIFY=y\nCONFIG_HSA_AMD_P2P=y",
    )
    named = [replace(gpu, name="AMD Instinct MI325X", memory=256 * GIB) for gpu in gpus]
    machine.change(software=ROCM, gpus=named, addresses=addresses, vendor="amd")
    return machine


def laptop(folder: Path) -> Machine:
    """Wireless network, a display controller of another vendor, nothing else."""
    machine = Machine(
        folder, system=SystemFacts(NO_GPU, [], {}, AMPLE, Libibverbs(False, "", "no libibverbs"))
    )
    tree = machine.sysfs
    tree.add_interface("lo", None, state="unknown", mtu=65536, kind=772)
    tree.add_pci("pci0000:00/0000:00:02.0", {"vendor": "0x8086", "class": "0x030000"})
    card = tree.add_pci(
        "pci0000:00/0000:00:14.3", {"vendor": "0x8086", "class": "0x028000"}, driver="iwlwifi"
    )
    tree.add_interface("wlp0s20f3", card)
    machine.write("proc/cpuinfo", "processor\t: 0\nmodel name\t: Made-up i7\nflags\t\t: fpu sse2")
    machine.write("proc/sys/kernel/osrelease", "6.14.0-15-generic")
    limits = replace(AMPLE, locked_memory=8 << 20, open_files=1024, shared_memory=8 * GIB)
    machine.change(
        addresses={"lo": ["127.0.0.1"], "wlp0s20f3": ["192.168.1.23"]}, limits=limits, vendor="cpu"
    )
    assert rdma_devices(sys_root=tree.root) == []
    return machine
