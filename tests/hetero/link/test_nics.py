"""Rails by the names that a user gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.device.topology import RdmaDevice
from hetero.link import nics
from hetero.link.nics import Nics, find_nics

DEVICES = [
    RdmaDevice("mlx5_0", pci=None, interfaces=("eth0",)),
    RdmaDevice("mlx5_1", pci=None, interfaces=("eth1",)),
    RdmaDevice("ib0", pci=None, interfaces=()),
]
ADDRESSES = {"eth0": "10.0.0.1", "eth1": "10.0.1.1", "lo": "127.0.0.1"}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nics, "rdma_devices", lambda sys_root: DEVICES)
    monkeypatch.setattr(nics, "interface_address", lambda name, family: ADDRESSES.get(name))


def test_without_names_tcp_takes_the_way_to_the_first_rank_and_verbs_chooses() -> None:
    assert find_nics((), own="127.0.0.1") == Nics(addresses=("127.0.0.1",), rdma=())


def test_an_interface_brings_the_rdma_device_on_it() -> None:
    assert find_nics(["eth1"], own="127.0.0.1") == Nics(("10.0.1.1",), ("mlx5_1",))


def test_an_rdma_device_brings_its_interface() -> None:
    found = find_nics(["mlx5_0", "mlx5_1:2"], own="127.0.0.1")
    assert found == Nics(("10.0.0.1", "10.0.1.1"), ("mlx5_0", "mlx5_1:2"))


def test_a_device_without_an_interface_meets_where_the_first_rank_is_reached() -> None:
    assert find_nics(["ib0"], own="127.0.0.1") == Nics(("127.0.0.1",), ("ib0",))


def test_a_nic_named_twice_is_one_rail() -> None:
    assert find_nics(["eth0", "mlx5_0"], own="127.0.0.1") == Nics(("10.0.0.1",), ("mlx5_0",))


def test_a_name_that_is_neither_is_refused_with_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"mlx5_9 is neither.*here: mlx5_0, mlx5_1, ib0"):
        find_nics(["mlx5_9"], own="127.0.0.1")


def test_a_host_without_rdma_devices_says_so(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"RDMA device \(here: none\)"):
        find_nics(["mlx5_0"], own="127.0.0.1", sys_root=tmp_path)
