"""What is read of a node, from made-up kernel trees and from this machine."""

from __future__ import annotations

import gzip
import resource

import pytest
import torch

from hetero.device.topology import Distance, pci_device
from hetero.tools.preflight_checks import report
from hetero.tools.preflight_checks.facts import (
    GpuFacts,
    Nic,
    PcieLink,
    Roots,
    own_requirements,
    read_kernel_options,
    read_limits,
    read_software,
    recommend,
    redirects_peers,
    run_tool,
    unmet_requirements,
)
from tests.hetero.device.fake_sysfs import H200, MI325X, THOR2, FakeSysfs
from tests.tools.preflight_checks.machines import config_space, h200_node, laptop, mi325x_node


def test_limits_are_those_of_this_process(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        assert read_limits().open_files == soft - 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert read_limits(str(tmp_path / "missing")).shared_memory == 0


def test_the_running_software_is_told():
    software = read_software()
    assert f"{software.torch}+{software.torch_build}".startswith(torch.__version__.split("+")[0])
    assert software.unmet == unmet_requirements(own_requirements())


def test_unmet_requirements_say_what_is_there_instead():
    lines = (
        *("# a comment", "-c other.txt", "", "psutil>=1", "psutil<1  # too new"),
        *("no-such-package-at-all>=2", "no-such-package-either; python_version < '3'"),
        "nor-this; extra == 'dev'",
    )
    old, missing = unmet_requirements(lines)
    assert old.startswith("psutil<1 is wanted and ")
    assert missing == "no-such-package-at-all>=2 is not installed"


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        *((config_space(control), False) for control in (0x00, 0x01)),
        *((config_space(control), True) for control in (0x04, 0x1D)),
        (bytes(4096), False),  # without access control
    ],
)
def test_a_port_redirects_when_requests_or_completions_are(tmp_path, space, expected):
    file = tmp_path / "sys/bus/pci/devices/0000:17:00.0/config"
    file.parent.mkdir(parents=True)
    file.write_bytes(space)
    assert redirects_peers(Roots.below(tmp_path), "0000:17:00.0") is expected


def test_a_vendors_program_may_be_absent_or_fail():
    assert run_tool(["no-such-program"]) == ""
    assert run_tool(["false"]) == ""
    assert run_tool(["echo", "570.124.06"]) == "570.124.06\n"


NO_LINK = PcieLink(0, 0, "")


def test_nodes_tell_their_drivers_gpus_and_places(tmp_path):
    facts = h200_node(tmp_path / "nvidia").read()
    gpus, host = facts.gpus, facts.host
    assert (gpus.driver, gpus.open_driver) == ("nvidia 570.124.06", False)
    assert gpus.on_bus == {"nvidia": 8}
    assert gpus.usable[0].pci.numa_node == 0
    assert str(gpus.usable[0].link) == "32.0 GT/s x16"
    assert (host.kernel, host.processor) == ("6.8.0-60-generic", "Made-up 9654")
    assert (host.governors, host.numa_nodes) == (("performance",), 2)
    assert host.virtual_machine is False
    # The NIC for management is no rail.
    assert "mgmt0" in [interface.name for interface in facts.interfaces]
    assert "mgmt0" not in [nic.name for nic in facts.nics]
    facts = mi325x_node(tmp_path / "amd").read()
    assert (facts.gpus.driver, facts.gpus.open_driver) == ("amdgpu 6.16.6", None)
    assert facts.gpus.on_bus == {"amd": 8}
    assert set(facts.gpudirect.kernel_options.values()) == {True}
    facts = laptop(tmp_path / "laptop").read()
    assert (facts.gpus.usable, facts.gpus.driver, facts.rdma) == ((), "", ())
    assert facts.recommended_nics == ("wlp0s20f3",)


def test_gpus_of_both_vendors_are_found_without_their_drivers(tmp_path):
    machine = laptop(tmp_path)
    machine.sysfs.add_pci("pci0000:05/0000:05:00.0", MI325X)
    machine.sysfs.add_pci("pci0000:30/0000:30:00.0", {**H200, "class": "0x030000"})
    machine.sysfs.add_pci("pci0000:40/0000:40:00.0", THOR2)
    machine.sysfs.add_pci("pci0000:50/0000:50:00.0", {"vendor": "0x8086", "class": "0x030000"})
    found = machine.read().gpus
    assert (found.on_bus, found.displays) == ({"amd": 1}, {"nvidia": 1})


def test_gpus_below_one_switch_are_given_different_nics(tmp_path):
    sysfs = FakeSysfs(tmp_path)
    switch = "pci0000:15/0000:15:01.0/0000:16:00.0"
    ends = [f"0000:17:0{port}.0/0000:{18 + port}:00.0" for port in range(4)]
    for end in ends:
        sysfs.add_pci(f"{switch}/{end}", H200)
    one, other, near, nearest = (
        pci_device(end.partition("/")[2], sys_root=tmp_path) for end in ends
    )
    gpus = [GpuFacts(index, "H200", 0, pci=pci) for index, pci in enumerate((one, other))]
    nics = [Nic(name, name, None, pci, 400.0) for name, pci in (("a", near), ("b", nearest))]
    assert [rail.nic.name for rail in recommend(gpus, nics)] == ["a", "b"]
    assert recommend(gpus, []) == ()


def test_an_rdma_port_has_its_state_rate_addresses_and_packet(tmp_path):
    devices = {device.name: device for device in h200_node(tmp_path).read().rdma}
    assert list(devices) == [f"mlx5_{index}" for index in range(8)]
    (port,) = devices["mlx5_0"].ports
    assert (port.state, port.link_layer, port.rate) == ("ACTIVE", "Ethernet", 400.0)
    assert port.interface == "ens0np0"
    assert port.roce_addresses == ("10.0.0.1",)
    assert port.packet_bytes == 4096
    assert devices["mlx5_0"].firmware == "28.39.1002"
    (down,) = devices["mlx5_3"].ports
    assert not down.is_active
    assert down.roce_addresses == ()


@pytest.mark.parametrize(("mtu", "packet"), [(1500, 1024), (4200, 4096), (4100, 2048), (200, None)])
def test_the_packet_of_roce_follows_from_the_interfaces_mtu(tmp_path, mtu, packet):
    machine = mi325x_node(tmp_path)
    (machine.folder / "sys/class/net/eth5/mtu").write_text(f"{mtu}\n")
    assert machine.read().rdma[5].ports[0].packet_bytes == packet


def test_infinibands_packet_is_asked_of_ibv_devinfo(tmp_path):
    machine = h200_node(tmp_path)
    machine.port_file("mlx5_1", "link_layer").write_text("InfiniBand\n")
    said = (
        "hca_id:\tmlx5_1\n\ttransport:\t\tInfiniBand (0)\n\t\tport:\t1\n"
        "\t\t\tstate:\t\t\tPORT_ACTIVE (4)\n\t\t\tactive_mtu:\t\t4096 (5)\n"
    )
    machine.change(tool=lambda command: said if command == ["ibv_devinfo"] else "")
    facts = machine.read()
    assert facts.rdma[1].ports[0].packet_bytes == 4096
    machine.change(tool=lambda command: "")
    assert machine.read().rdma[1].ports[0].packet_bytes is None


def test_each_gpu_is_given_the_nic_below_its_own_switch_or_one_of_its_socket(tmp_path):
    facts = mi325x_node(tmp_path / "amd").read()
    assert [rail.nic.rdma for rail in facts.rails] == [f"bnxt_re{index}" for index in range(8)]
    assert {rail.distance for rail in facts.rails} == {Distance.SAME_SWITCH}
    assert facts.recommended_nics == tuple(f"eth{index}" for index in range(8))
    facts = h200_node(tmp_path / "nvidia").read()  # of which one is down
    rail = facts.rails[3]
    assert rail.distance is Distance.SAME_NUMA_NODE
    assert rail.nic.name in ("ens0np0", "ens1np0", "ens2np0")
    assert "ens3np0" not in facts.recommended_nics
    assert len(facts.recommended_nics) == 7


def test_a_bond_or_a_containers_interface_is_a_rail_where_it_is_faster_or_alone(tmp_path):
    machine = laptop(tmp_path)
    addresses = dict(machine.system.addresses)
    for name in ("bond0", "docker0"):
        machine.sysfs.add_interface(name, None, speed=200000)
        addresses[name] = ["10.1.2.3"]
    (machine.folder / "sys/class/net/docker0/bridge").mkdir()
    machine.change(addresses=addresses)
    assert machine.read().recommended_nics == ("bond0",)
    machine.change(addresses=addresses | {"bond0": ["169.254.1.2"]})
    assert machine.read().recommended_nics == ("wlp0s20f3",)
    machine.change(addresses={name: addresses[name] for name in ("lo", "docker0")})
    assert machine.read().recommended_nics == ()


def test_the_kernels_configuration_is_found_in_boot_or_in_proc(tmp_path):
    machine = laptop(tmp_path)
    kernel = machine.read().host.kernel
    assert set(read_kernel_options(machine.roots, kernel).values()) == {None}
    packed = machine.folder / "proc/config.gz"
    packed.write_bytes(gzip.compress(b"CONFIG_PCI_P2PDMA=y\n# CONFIG_HSA_AMD_P2P is not set\n"))
    assert read_kernel_options(machine.roots, kernel) == {
        "CONFIG_DMABUF_MOVE_NOTIFY": False,
        "CONFIG_PCI_P2PDMA": True,
        "CONFIG_HSA_AMD_P2P": False,
    }
    packed.write_bytes(b"cut off")
    assert set(read_kernel_options(machine.roots, kernel).values()) == {None}


@pytest.mark.parametrize("machine", [h200_node, mi325x_node, laptop])
def test_the_text_of_a_node_is_at_most_a_hundred_columns_wide(tmp_path, machine):
    lines = report.node_lines(machine(tmp_path).read(), [])
    assert max(map(len, lines)) <= 100
    assert any("--hetero-nics" in line for line in lines)
