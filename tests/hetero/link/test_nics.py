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
OWN = "127.0.0.1"
ADDRESSES = {"eth0": "10.0.0.1", "eth1": "10.0.1.1", "lo": "127.0.0.1"}


@pytest.fixture(autouse=True)
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


@pytest.mark.parametrize(("names", "found"), RAILS.values(), ids=RAILS)
def test_names_become_rails(names: str, found: Nics) -> None:
    assert find_nics(names.split(), own=OWN) == found


def test_a_name_that_is_neither_is_refused_with_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"mlx5_9 is neither.*here: mlx5_0, mlx5_1, ib0"):
        find_nics(["mlx5_9"], own=OWN)


def test_a_host_without_rdma_devices_says_so(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"RDMA device \(here: none\)"):
        find_nics(["mlx5_0"], own=OWN, sys_root=tmp_path)
