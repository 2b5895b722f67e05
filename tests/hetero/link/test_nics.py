"""NICs by the names that a user gives, and the RDMA port of each rail."""

from __future__ import annotations

from ipaddress import IPv6Address
from pathlib import Path

import pytest

from hetero.device.topology import RdmaDevice, pci_device
from hetero.errors import LinkError
from hetero.link import nics
from hetero.link.nics import (
    INFINIBAND,
    ROCE,
    Gid,
    Nics,
    Port,
    choose_gid,
    find_nics,
    find_ports,
    nearest_devices,
    pair_ports,
    read_gids,
)
from tests.hetero.device.fake_sysfs import CONNECTX7, H200, FakeSysfs
from tests.loopback_nic.library import GID, GID_INDEX, LoopbackNics

DEVICES = [
    RdmaDevice("mlx5_0", pci=None, interfaces=("eth0",)),
    RdmaDevice("mlx5_1", pci=None, interfaces=("eth1",)),
    RdmaDevice("ib0", pci=None, interfaces=()),
]
OWN = "127.0.0.1"
ADDRESSES = {"eth0": "10.0.0.1", "eth1": "10.0.1.1", "lo": "127.0.0.1"}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nics, "rdma_devices", lambda sys_root: DEVICES)
    monkeypatch.setattr(nics, "interface_address", lambda name, family: ADDRESSES.get(name))


RAILS: dict[str, tuple[str, Nics]] = {
    "without names tcp goes towards the first rank and verbs chooses": ("", Nics((OWN,), ())),
    "an interface brings the RDMA device on it": ("eth1", Nics(("10.0.1.1",), ("mlx5_1",))),
    "an RDMA device brings its interface": (
        "mlx5_0 mlx5_1:2",
        Nics(("10.0.0.1", "10.0.1.1"), ("mlx5_0", "mlx5_1:2")),
    ),
    "a device without one meets where the first rank is": ("ib0", Nics((OWN,), ("ib0",))),
    "a NIC named twice is one rail": ("eth0 mlx5_0", Nics(("10.0.0.1",), ("mlx5_0",))),
}


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("names", "found"), RAILS.values(), ids=RAILS)
def test_names_become_rails(names: str, found: Nics) -> None:
    assert find_nics(names.split(), own=OWN) == found


@pytest.mark.usefixtures("machine")
def test_a_name_that_is_neither_is_refused_with_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"mlx5_9 is neither.*here: mlx5_0, mlx5_1, ib0"):
        find_nics(["mlx5_9"], own=OWN)


def test_a_host_without_rdma_devices_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"RDMA device \(here: none\)"):
        find_nics(["mlx5_0"], own=OWN, sys_root=tmp_path)


IB, V1, V2 = "IB/RoCE v1", "IB/RoCE v1", "RoCE v2"
IPV4 = "0000:0000:0000:0000:0000:ffff:0a01:0001"
OTHER_IPV4 = "0000:0000:0000:0000:0000:ffff:0a01:0101"
IPV6 = "2001:0db8:0000:0000:0000:0000:0000:0001"
LINK_LOCAL = "fe80:0000:0000:0000:0202:c9ff:fe00:0001"


def entry(index: int, kind: str, address: str) -> Gid:
    return Gid(index, kind, IPv6Address(address))


def chosen(*gids: Gid, on_ethernet: bool = True) -> int | None:
    found = choose_gid(gids, on_ethernet=on_ethernet)
    return None if found is None else found.index


def test_the_address_is_a_roce_v2_one_of_ipv4_wherever_it_stands() -> None:
    table = (
        entry(0, V1, LINK_LOCAL),
        entry(1, V2, LINK_LOCAL),
        entry(2, V1, IPV4),
        entry(7, V2, IPV4),
    )
    assert chosen(*table) == 7
    assert chosen(*reversed(table)) == 7


def test_of_several_ipv4_addresses_the_first_is_taken_and_no_further_one_read() -> None:
    table = iter((entry(1, V2, IPV6), entry(3, V2, IPV4), entry(5, V2, OTHER_IPV4)))
    assert choose_gid(table, on_ethernet=True) == entry(3, V2, IPV4)
    assert [gid.index for gid in table] == [5]


def test_an_ipv6_address_will_do_but_no_link_local_one() -> None:
    assert chosen(entry(1, V2, LINK_LOCAL), entry(3, V2, IPV6)) == 3
    assert chosen(entry(1, V2, LINK_LOCAL), entry(2, V1, IPV4)) is None


def test_infiniband_has_one_kind_of_address() -> None:
    assert chosen(entry(0, IB, LINK_LOCAL), on_ethernet=False) == 0


GPU = "pci0000:00/0000:00:02.0/0000:11:00.0/0000:12:02.0/0000:15:00.0"
NICS = {
    "mlx5_0": "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0",
    "mlx5_1": "pci0000:00/0000:00:02.0/0000:11:00.0/0000:12:00.0/0000:13:00.0",
    "mlx5_2": "pci0000:00/0000:00:02.0/0000:11:00.0/0000:12:01.0/0000:14:00.0",
}


@pytest.fixture
def sys_root(tmp_path: Path) -> Path:
    tree = FakeSysfs(tmp_path)
    tree.add_pci(GPU, H200, numa_node=0)
    for name, path in NICS.items():
        tree.add_rdma(name, tree.add_pci(path, CONNECTX7, numa_node=0))
    return tmp_path


def test_the_nics_below_the_gpus_own_switch_are_chosen(sys_root: Path) -> None:
    gpu = pci_device("0000:15:00.0", sys_root=sys_root)
    assert nearest_devices(gpu, sys_root=sys_root) == ("mlx5_1", "mlx5_2")


def test_without_a_gpu_every_nic_is_taken(sys_root: Path) -> None:
    assert nearest_devices(None, sys_root=sys_root) == ("mlx5_0", "mlx5_1", "mlx5_2")


def port(name: str, network: str, kind: str = ROCE) -> Port:
    same = {"number": 1, "gid": IPV4, "gid_index": 0, "lid": 0, "mtu": 5, "max_message": 1 << 20}
    return Port(device=name, kind=kind, network=network, **same)


def test_ports_of_one_network_go_together() -> None:
    ours = [port("a0", "10.1.0.0/24"), port("a1", "10.2.0.0/24")]
    theirs = [port("b0", "10.2.0.0/24"), port("b1", "10.3.0.0/24"), port("b2", "10.1.0.0/24")]
    assert pair_ports(ours, theirs) == [(0, 2), (1, 0)]


def test_on_a_routed_fabric_ports_of_one_kind_go_together_in_order() -> None:
    ours = [port("a0", "10.1.0.0/24"), port("a1", "", INFINIBAND), port("a2", "10.2.0.0/24")]
    theirs = [port("b0", "10.3.0.0/24"), port("b1", "10.4.0.0/24"), port("b2", "10.5.0.0/24")]
    assert pair_ports(ours, theirs) == [(0, 0), (2, 1)]


def test_infiniband_and_ethernet_never_go_together() -> None:
    assert pair_ports([port("a0", "", INFINIBAND)], [port("b0", "")]) == []


def test_the_addresses_of_a_port_are_read_without_the_empty_places(tmp_path: Path) -> None:
    texts = {"0": LINK_LOCAL, "3": IPV4, "10": IPV6, "1": "0000:" * 7 + "0000", "2": ""}
    for folder in ("gids", "gid_attrs/types"):
        (tmp_path / folder).mkdir(parents=True)
    for index, text in texts.items():
        (tmp_path / "gids" / index).write_text(text + "\n")
        (tmp_path / "gid_attrs/types" / index).write_text(V2 + "\n")
    expected = [entry(0, V2, LINK_LOCAL), entry(3, V2, IPV4), entry(10, V2, IPV6)]
    assert list(read_gids(tmp_path)) == expected


def found_ports(nics: LoopbackNics, *names: str) -> list[Port]:
    return find_ports(names, sys_root=nics.sys_root)


def test_a_port_is_described_by_what_its_device_says(nics: LoopbackNics) -> None:
    nics["a0"].max_message = 1 << 20
    (found,) = found_ports(nics, "a0")
    assert (found.kind, found.gid, found.gid_index) == (ROCE, GID.format(0), GID_INDEX)
    assert (found.mtu, found.max_message) == (5, 1 << 20)


def test_ports_that_cannot_be_used_are_named_with_the_reason(nics: LoopbackNics) -> None:
    nics["a0"].is_down = True
    with pytest.raises(LinkError, match="a0:1 is not active; mlx5_9:1 the device cannot be opened"):
        found_ports(nics, "a0", "mlx5_9")
    assert [str(found) for found in found_ports(nics, "a0", "a1")] == ["a1:1"]


def test_a_port_is_named_behind_its_device(nics: LoopbackNics) -> None:
    assert [str(found) for found in found_ports(nics, "a0:1")] == ["a0:1"]
    with pytest.raises(LinkError, match="a0:2 it cannot be asked"):
        found_ports(nics, "a0:2")


def test_a_port_without_an_address_of_its_kind_says_so(nics: LoopbackNics) -> None:
    folder = nics.sys_root / "class/infiniband/a0/ports/1/gid_attrs/types"
    (folder / str(GID_INDEX)).write_text(V1)
    with pytest.raises(LinkError, match="a0:1 has no RoCE v2 address"):
        found_ports(nics, "a0")


def test_no_port_is_found_on_a_host_without_rdma_devices(nics: LoopbackNics) -> None:
    with pytest.raises(LinkError, match="no RDMA device"):
        found_ports(nics)
