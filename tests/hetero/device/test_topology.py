"""What the PCIe tree says: where a device is, and how far a NIC is from a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.device import topology
from hetero.device.topology import Distance
from tests.hetero.device.fake_sysfs import CONNECTX7, H200, FakeSysfs

# Two root complexes of socket 0 and one of socket 1; two GPUs and two NICs below the first switch.
SWITCH = "pci0000:15/0000:15:01.0/0000:16:00.0"
DEVICES = {
    "gpu0": (f"{SWITCH}/0000:17:00.0/0000:18:00.0", H200, 0),
    "gpu1": (f"{SWITCH}/0000:17:01.0/0000:19:00.0", H200, 0),
    "nic0": (f"{SWITCH}/0000:17:02.0/0000:1a:00.0", CONNECTX7, 0),
    "nic1": (f"{SWITCH}/0000:17:03.0/0000:1b:00.0", CONNECTX7, 0),
    "nic2": ("pci0000:15/0000:15:03.0/0000:20:00.0", CONNECTX7, 0),
    "nic3": ("pci0000:37/0000:37:01.0/0000:38:00.0", CONNECTX7, 0),
    "nic10": ("pci0000:97/0000:97:01.0/0000:98:00.0", CONNECTX7, 1),
}


@pytest.fixture
def sysfs(tmp_path) -> FakeSysfs:
    tree = FakeSysfs(tmp_path)
    for name, (path, attributes, node) in DEVICES.items():
        driver = "nvidia" if name.startswith("gpu") else "mlx5_core"
        folder = tree.add_pci(path, attributes, numa_node=node, driver=driver)
        if name.startswith("nic"):
            number = name.removeprefix("nic")
            tree.add_interface(f"eth{number}", folder)
            tree.add_rdma(f"mlx5_{number}", folder)
    tree.add_interface("lo", None)
    return tree


def place(sysfs: FakeSysfs, name: str) -> topology.PciDevice:
    address = DEVICES[name][0].rsplit("/", 1)[1]
    device = topology.pci_device(address, sys_root=sysfs.root)
    assert device is not None
    return device


@pytest.mark.parametrize(
    ("nic", "expected"),
    [
        ("nic0", Distance.SAME_SWITCH),
        ("nic2", Distance.SAME_HOST_BRIDGE),
        ("nic3", Distance.SAME_NUMA_NODE),
        ("nic10", Distance.ACROSS_NUMA_NODES),
    ],
)
def test_the_distance_is_where_the_two_paths_part(sysfs, nic, expected):
    one, other = place(sysfs, "gpu0"), place(sysfs, nic)
    assert topology.distance(one, other) is expected
    assert topology.distance(other, one) is expected


def test_a_device_that_is_not_on_the_bus_is_at_an_unknown_distance(sysfs):
    assert topology.pci_device("0000:ff:00.0", sys_root=sysfs.root) is None
    assert topology.distance(place(sysfs, "gpu0"), None) is Distance.UNKNOWN


def test_root_complexes_without_numa_nodes_are_at_an_unknown_distance(tmp_path):
    tree = FakeSysfs(tmp_path)
    for path in ("pci0000:00/0000:00:02.0", "pci0001:00/0001:00:02.0"):
        tree.add_pci(path, CONNECTX7)
    one, other = (
        topology.pci_device(a, sys_root=tmp_path) for a in ("0000:00:02.0", "0001:00:02.0")
    )
    assert topology.distance(one, other) is Distance.UNKNOWN


def test_an_address_is_found_however_cuda_or_hip_writes_it(sysfs):
    found = topology.pci_device("0000:1A:00.0", sys_root=sysfs.root)
    assert found is not None
    assert found.address == "0000:1a:00.0"
    assert found.path[1:-1] == ("0000:15:01.0", "0000:16:00.0", "0000:17:02.0")


def test_the_ports_between_two_devices_are_those_below_what_they_share(sysfs):
    ports = topology.ports_between(place(sysfs, "gpu0"), place(sysfs, "nic1"))
    assert ports == ("0000:17:00.0", "0000:17:03.0")


def test_devices_are_listed_with_their_interfaces_in_the_order_of_their_numbers(sysfs):
    rdma = topology.rdma_devices(sys_root=sysfs.root)
    assert [device.name for device in rdma] == [f"mlx5_{n}" for n in (0, 1, 2, 3, 10)]
    assert rdma[4].interfaces == ("eth10",)
    assert rdma[4].pci == place(sysfs, "nic10")


def test_software_rdma_takes_its_interface_from_its_first_gid(tmp_path):
    tree = FakeSysfs(tmp_path)
    gid = ("0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2", "veth0")
    on_a_vlan = ("0000:0000:0000:0000:0000:ffff:0a07:0001", "RoCE v2", "veth0.7")
    tree.add_rdma("rxe0", None, gids=(gid, on_a_vlan))
    (device,) = topology.rdma_devices(sys_root=tmp_path)
    assert device == topology.RdmaDevice("rxe0", pci=None, interfaces=("veth0",))


def test_an_interface_lies_where_its_pci_device_lies(sysfs, tmp_path):
    carrier = sysfs.add_pci("pci0000:00/0000:00:03.0", {"vendor": "0x1af4", "class": "0x020000"})
    sysfs.add_interface("eth7", carrier / "virtio2")
    places = {
        name: topology.parent_on_pci(tmp_path / "class/net" / name)
        for name in ("eth7", "eth10", "lo")
    }
    assert places["eth7"] is not None
    assert places["eth7"].path == ("pci0000:00", "0000:00:03.0")
    assert places["eth10"] == place(sysfs, "nic10")
    assert places["lo"] is None


def test_a_host_without_sysfs_has_no_devices(tmp_path):
    assert topology.rdma_devices(sys_root=Path(tmp_path / "nothing")) == []
