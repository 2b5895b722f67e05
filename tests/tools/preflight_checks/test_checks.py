"""What is wrong with a node, and with several together, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from hetero.tools.preflight_checks.checks import (
    Advice,
    NodeCard,
    Severity,
    advise,
    advise_cluster,
    worst_first,
)
from hetero.tools.preflight_checks.facts import Libibverbs
from hetero.tools.preflight_checks.network import Call, PathResult
from tests.tools.preflight_checks.machines import (
    AMPLE,
    NO_GPU,
    OPEN,
    Machine,
    config_space,
    h200_node,
    laptop,
    mi325x_node,
)


def said(machine: Machine, severity: Severity, subject: str) -> str:
    """The one sentence about a subject at a severity."""
    fitting = [a for a in advise(machine.read()) if (a.severity, a.subject) == (severity, subject)]
    assert len(fitting) == 1, fitting
    return fitting[0].text


def test_a_node_with_nothing_amiss_is_told_nothing_and_a_laptop_that_it_has_no_gpu(tmp_path):
    assert advise(mi325x_node(tmp_path / "node").read()) == []
    machine = laptop(tmp_path / "laptop")
    (advice,) = advise(machine.read())
    assert advice.severity is Severity.NOTE
    assert "no GPU" in advice.text
    # A display that no build uses is only noted.
    place = "pci0000:00/0000:00:01.0/0000:01:00.0"
    machine.sysfs.add_pci(place, {"vendor": "0x10de", "class": "0x030000"})
    machine.change(tool=lambda command: "")
    assert "1 nvidia GPUs" in said(machine, Severity.NOTE, "GPU")


def test_the_h200_node_is_told_of_its_dead_nic_and_of_the_missing_module(tmp_path):
    machine = h200_node(tmp_path)
    advice = advise(machine.read())
    assert [a.severity for a in advice] == [Severity.WARNING, Severity.WARNING, Severity.NOTE]
    assert "mlx5_3 port 1 (ens3np0) is down" in said(machine, Severity.WARNING, "RDMA")
    missing = said(machine, Severity.WARNING, "GPU-direct")
    assert "nvidia_peermem is not loaded" in missing
    assert "proprietary kernel modules offer no dma-buf" in missing
    assert "modprobe nvidia_peermem" in missing
    assert "GPUs 0, 3 share" in said(machine, Severity.NOTE, "topology")
    machine.load_module("nvidia_peermem")
    assert "GPU-direct" not in [a.subject for a in advise(machine.read())]


def test_open_kernel_modules_do_without_nvidia_peermem_on_a_new_kernel(tmp_path):
    machine = h200_node(tmp_path)
    machine.write("proc/driver/nvidia/version", OPEN)
    assert "through dma-buf" in said(machine, Severity.NOTE, "GPU-direct")
    machine.write("proc/sys/kernel/osrelease", "5.4.0-200-generic")
    assert "5.4.0-200-generic is too old" in said(machine, Severity.WARNING, "GPU-direct")


def test_amd_is_told_which_kernel_options_are_missing(tmp_path):
    machine = mi325x_node(tmp_path)
    machine.write("boot/config-6.8.0-60-generic", "CONFIG_HSA_AMD_P2P=y\nCONFIG_PCI_P2PDMA=y")
    text = said(machine, Severity.WARNING, "GPU-direct")
    assert "the kernel lacks CONFIG_DMABUF_MOVE_NOTIFY and" in text
    (machine.folder / "boot/config-6.8.0-60-generic").unlink()
    assert "cannot be read" in said(machine, Severity.NOTE, "GPU-direct")
    (machine.folder / "sys/kernel/mm/memory_peers/amdkfd").mkdir(parents=True)
    assert advise(machine.read()) == []


def test_invisible_gpus_and_missing_drivers_are_problems(tmp_path):
    machine = h200_node(tmp_path / "nvidia")
    machine.change(software=NO_GPU, gpus=[], vendor="cpu")
    text = said(machine, Severity.PROBLEM, "GPU")
    assert "none of the node's 8 nvidia GPUs" in text
    assert "install its CUDA build" in text
    machine = h200_node(tmp_path / "without a driver")
    (machine.folder / "proc/driver/nvidia/version").unlink()
    machine.change(gpus=[], vendor="cpu", tool=lambda command: "")
    assert "no CUDA driver is loaded" in said(machine, Severity.PROBLEM, "GPU")
    machine = mi325x_node(tmp_path / "amd")
    machine.change(software=replace(NO_GPU, torch_build="cu130"), gpus=[], vendor="cpu")
    assert "built for cu130: install its ROCm build" in said(machine, Severity.PROBLEM, "GPU")


def test_lost_gpus_are_a_warning_and_hidden_ones_a_note(tmp_path, monkeypatch):
    machine = h200_node(tmp_path)
    machine.change(gpus=list(machine.system.gpus)[:6])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "sees 6 of 8 GPUs (look for lost" in said(machine, Severity.WARNING, "GPU")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5")
    assert "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5" in said(machine, Severity.NOTE, "GPU")


def test_forbidden_device_files_and_unmet_requirements_are_named(tmp_path):
    machine = mi325x_node(tmp_path)
    facts = machine.read()
    direct = replace(facts.gpudirect, forbidden_files=("uverbs3",))
    (advice,) = advise(replace(facts, gpudirect=direct))
    assert "may not open /dev/infiniband/uverbs3" in advice.text
    line = "megatron-core==0.16.1 is wanted and 0.15.0 installed"
    machine.change(software=replace(machine.system.software, unmet=(line,)))
    assert said(machine, Severity.PROBLEM, "software").startswith(line)


CPU1 = "sys/devices/system/cpu/cpu1"


def file(path: str, text: str) -> Callable[[Machine], None]:
    return lambda machine: machine.write(path, text)


def limit(**limits: int) -> Callable[[Machine], None]:
    return lambda machine: machine.change(limits=replace(AMPLE, **limits))


def no_device_files(machine: Machine) -> None:
    for name in (machine.folder / "dev/infiniband").iterdir():
        name.unlink()


def redirecting_switch(machine: Machine) -> None:
    port = machine.folder / "sys/bus/pci/devices/0000:17:01.0/config"
    port.write_bytes(config_space(access_control=0x1D))


def nic_on_other_socket(machine: Machine) -> None:
    for index in range(4):
        machine.port_file(f"bnxt_re{index}", "state").write_text("1: DOWN\n")


@pytest.mark.parametrize(
    ("fault", "subject", "expected"),
    [
        (
            file("sys/bus/pci/devices/0000:18:00.0/current_link_width", "8"),
            "GPU",
            "GPU 0 runs on 8 of its 16 PCIe lanes",
        ),
        (
            file("sys/class/infiniband/bnxt_re2/ports/1/gid_attrs/types/3", "IB/RoCE v1"),
            "RDMA",
            "bnxt_re2 port 1 (eth2) has no IPv4 RoCE v2 address",
        ),
        (file("sys/class/net/eth2/mtu", "1500"), "RDMA", "packets of 1024 bytes"),
        (limit(locked_memory=64 << 10), "limits", "only 64.0 KiB may be locked"),
        (limit(shared_memory=512 << 20), "limits", "/dev/shm holds 512.0 MiB, too little for RCCL"),
        (limit(open_files=1024), "limits", "1024 open files"),
        (file(f"{CPU1}/cpufreq/scaling_governor", "powersave"), "CPU", "governor is powersave"),
        (file("proc/sys/kernel/numa_balancing", "1"), "CPU", "NUMA balancing is on"),
        (file("sys/kernel/iommu_groups/12/type", "DMA-FQ"), "PCIe", "`iommu=pt`"),
        (
            lambda machine: machine.change(libibverbs=Libibverbs(False, "", "cannot use it")),
            "RDMA",
            "cannot use it",
        ),
        (no_device_files, "RDMA", "no /dev/infiniband/uverbs*"),
        (redirecting_switch, "PCIe", "services of 1 switch ports (0000:17:01.0 first)"),
    ],
)
def test_each_fault_brings_its_own_warning_and_nothing_else(
    tmp_path, fault: Callable[[Machine], None], subject: str, expected: str
):
    machine = mi325x_node(tmp_path)
    fault(machine)
    (advice,) = advise(machine.read())
    assert (advice.severity, advice.subject) == (Severity.WARNING, subject)
    assert expected in advice.text


def test_gpus_whose_socket_has_lost_all_nics_are_told_so(tmp_path):
    machine = mi325x_node(tmp_path)
    nic_on_other_socket(machine)
    told = [a.text for a in advise(machine.read()) if a.subject == "topology"]
    assert sum("is on another socket" in text for text in told) == 4


def test_a_containers_default_shared_memory_is_a_problem(tmp_path):
    machine = h200_node(tmp_path)
    machine.change(limits=replace(AMPLE, shared_memory=64 << 20))
    assert "docker --shm-size" in said(machine, Severity.PROBLEM, "limits")


def test_switch_ports_that_only_root_may_read_are_noted(tmp_path):
    machine = mi325x_node(tmp_path)
    # Without root the kernel gives the first 64 bytes.
    for port in ("0000:17:00.0", "0000:17:01.0"):
        (machine.folder / f"sys/bus/pci/devices/{port}/config").write_bytes(bytes(64))
    assert "ACS of 2 switch ports" in said(machine, Severity.NOTE, "PCIe")


def test_a_virtual_machine_that_hides_the_tree_is_noted(tmp_path):
    machine = mi325x_node(tmp_path)
    machine.write("proc/cpuinfo", "model name\t: Made-up 9654\nflags\t\t: fpu hypervisor")
    assert advise(machine.read()) == []  # This one shows its switches.
    nic_on_other_socket(machine)
    for index in range(4, 7):
        machine.port_file(f"bnxt_re{index}", "state").write_text("1: DOWN\n")
    facts = machine.read()
    hidden = replace(facts, rails=tuple(r for r in facts.rails if r.gpu != 7))
    told = [a for a in advise(hidden) if a.subject == "topology"]
    assert [a.severity for a in told] == [Severity.NOTE]
    assert "hides where GPUs and NICs are" in told[0].text


def test_the_worst_comes_first():
    kinds = (Severity.NOTE, Severity.PROBLEM, Severity.WARNING, Severity.PROBLEM)
    advice = [Advice(kind, "x", str(index)) for index, kind in enumerate(kinds)]
    assert [a.text for a in worst_first(advice)] == ["1", "3", "2", "0"]


def card(number: int, **changes: object) -> NodeCard:
    """One of several AMD nodes that differ in nothing but their names."""
    plain = NodeCard(
        number=number,
        host=f"host{number}",
        network=f"network {number}",
        vendor="amd",
        gpus=("AMD Instinct MI325X",) * 8,
        driver="amdgpu 6.16.6",
        project="0.1.0",
        torch="2.12.1",
        megatron_core="0.16.1",
        python="3.11.7",
        collectives="RCCL 2.27.7",
        addresses={"eth0": f"10.0.0.{number + 1}"},
        mtus={"eth0": 9000},
        gloo_interfaces_amiss=(),
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def call(source: int, target: int, **changes: object) -> Call:
    return replace(Call(source, target, "eth0", "eth0", "", 0.0, 1e-4), **changes)  # type: ignore[arg-type]


def path(source: int, target: int, there: float, back: float, name: str = "tcp") -> PathResult:
    return PathResult(name, 50.0, there, back, min(there, back), source=source, target=target)


def nvidia(number: int, **changes: object) -> NodeCard:
    own = {"vendor": "nvidia", "driver": "nvidia 570.1", "collectives": "NCCL 2.28.9"}
    return card(number, gpus=("NVIDIA H200",) * 8, **own, **changes)


def test_nodes_that_can_work_together_are_told_nothing():
    calls = [call(0, 1), call(1, 0)]
    paths = [path(0, 1, 10.0, 9.0)]
    one_host = {"network": "the same", "gloo_interfaces_amiss": ("lo",)}
    for nodes in (
        [card(0), card(1)],
        [card(0), nvidia(1)],
        [card(0), card(1, python="3.11.9")],  # a patch release
        [card(0, **one_host), card(1, **one_host)],
    ):
        assert advise_cluster(nodes, calls, paths) == []


@pytest.mark.parametrize(
    ("change", "severity", "expected"),
    [
        ({"torch": "2.11.0"}, Severity.PROBLEM, "node 0 (host0): 2.12.1; node 1 (host1): 2.11.0"),
        ({"megatron_core": "0.15.0"}, Severity.PROBLEM, "versions of megatron-core"),
        ({"project": "0.2.0"}, Severity.PROBLEM, "versions of this project"),
        ({"collectives": "RCCL 2.22.3"}, Severity.PROBLEM, "different collective libraries"),
        ({"python": "3.12.1"}, Severity.NOTE, "a run does not need the same"),
        ({"driver": "amdgpu 6.10.5"}, Severity.WARNING, "different drivers"),
        ({"gpus": ("AMD Instinct MI300X",) * 8}, Severity.WARNING, "8x AMD Instinct MI300X"),
        ({"mtus": {"eth0": 1500}}, Severity.WARNING, "different MTUs"),
        ({"host": "host0"}, Severity.WARNING, "2 nodes are called host0"),
        ({"gloo_interfaces_amiss": ("lo",)}, Severity.PROBLEM, "GLOO_SOCKET_IFNAME names lo on"),
        ({"addresses": {}, "mtus": {"eth0": 9000}}, Severity.PROBLEM, "no NIC with an IP "),
    ],
)
def test_each_difference_brings_its_own_sentence(change, severity, expected):
    (advice,) = advise_cluster([card(0), card(1, **change)], [], [])
    assert advice.severity is severity
    assert expected in advice.text


def test_different_pytorch_releases_are_said_to_hang():
    (advice,) = advise_cluster([card(0), nvidia(1, torch="2.11.0")], [], [])
    assert "may hang" in advice.text


@pytest.mark.parametrize("others", [False, True])
def test_nodes_that_reach_each_other_over_no_nic_are_a_problem_that_names_both_ends(others: bool):
    failed = call(1, 0, error="10.0.0.1:4711 from 10.0.0.2: timed out", clock_difference=None)
    calls = [call(0, 1), failed, *([call(1, 0)] if others else [])]
    (advice,) = advise_cluster([card(0), card(1)], calls, [])
    assert advice.severity is (Severity.WARNING if others else Severity.PROBLEM)
    assert "node 1 (host1) cannot reach node 0 (host0) over eth0 - eth0 (10.0.0.1:4711" in (
        advice.text
    )


def test_nics_of_one_address_and_lost_large_packets_are_told_from_closed_ports():
    bridge = {"addresses": {"eth0": "172.17.0.1"}}
    refused = [call(0, 1, error="refused"), call(1, 0, error="refused")]
    (advice,) = advise_cluster([card(0, **bridge), card(1, **bridge)], refused, [])
    assert advice.severity is Severity.PROBLEM
    assert "eth0 of node 0 (host0) and eth0 of node 1 (host1) have the same address" in advice.text
    (advice,) = advise_cluster([card(0), card(1)], [call(0, 1), call(1, 0, lost_bytes=9000)], [])
    assert advice.severity is Severity.PROBLEM
    assert "9000 bytes get lost from node 1 (host1) to node 0 (host0)" in advice.text


@pytest.mark.parametrize(
    ("difference", "way"), [(65.2, "65.2 s ahead of that of node 0"), (-2.0, "2.0 s behind that")]
)
def test_clocks_that_differ_are_a_warning(difference, way):
    calls = [call(0, 1, clock_difference=difference), call(1, 0, clock_difference=-difference)]
    (advice,) = advise_cluster([card(0), card(1)], calls, [])
    assert advice.severity is Severity.WARNING
    assert way in advice.text
    unsure = [call(0, 1, clock_difference=2.0, clock_uncertainty=3.0)]
    assert advise_cluster([card(0), card(1)], unsure, []) == []


def test_a_pair_that_lags_behind_the_others_and_a_path_that_is_uneven_are_named():
    cards = [card(index) for index in range(3)]
    paths = [path(0, 1, 10.0, 10.0), path(0, 2, 10.5, 10.0), path(1, 2, 4.0, 4.5)]
    (advice,) = advise_cluster(cards, [], paths)
    assert advice.severity is Severity.WARNING
    assert "node 1 (host1) - node 2 (host2): tcp reaches 4.00 GB/s where 10.00" in advice.text
    (advice,) = advise_cluster(cards[:2], [], [path(0, 1, 10.0, 3.0)])
    assert "10.00 GB/s there and 3.00 back" in advice.text


def test_a_failed_path_is_a_warning_and_no_path_at_all_a_problem():
    failed = [PathResult(name, 0, 0, 0, 0, error="refused", target=1) for name in ("tcp", "auto")]
    first, second = advise_cluster([card(0), card(1)], [], failed)
    assert (first.severity, second.severity) == (Severity.PROBLEM, Severity.WARNING)
    assert "auto failed (refused)" in first.text
