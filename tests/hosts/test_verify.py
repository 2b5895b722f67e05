"""`hetero verify` on two emulated hosts: all of it, and what it says of faults put there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.network import Host, Network

pytestmark = pytest.mark.slow
PORT = "29531"
PLAYED = ({"HETERO_VENDOR": "amd"}, {"HETERO_VENDOR": "nvidia"})
TORCH = "import torch\ntorch.__version__ = torch.torch_version.TorchVersion('2.99.0')\n"
WRONG_OPERATOR = """
import os
if os.environ.get("HETERO_VENDOR") == "amd":
    import torch
    exact = torch.nn.functional.linear

    def linear(*arguments, **named):
        result = exact(*arguments, **named)
        if result.shape[-1] == 512:
            result = result.clone()
            result.view(-1)[::997] *= 1.5
        return result

    torch.nn.functional.linear = linear
"""


def verify(
    hosts: Sequence[Host],
    out: Path,
    *words: str,
    environs: Sequence[Mapping[str, str]] = PLAYED,
    code: int,
) -> dict[str, Any]:
    """The report, without names, of one process on each host; they end with this code."""
    processes = [
        host.start(
            [
                *("tools/verify.py", "--nnodes", "2", "--node-rank", str(node)),
                *("--master-addr", hosts[0].address(), "--master-port", PORT, "--out", str(out)),
                *("--deadline-factor", "4", *words),
            ],
            environ=environ,
            is_preloaded=False,
        )
        for node, (host, environ) in enumerate(zip(hosts, environs, strict=True))
    ]
    said = [process.communicate(timeout=1500)[0] for process in processes]
    assert [process.returncode for process in processes] == [code, code], said
    record: dict[str, Any] = json.loads((out / "verify.json").read_text())
    return record


def failures(record: Mapping[str, Any], name: str) -> list[dict[str, str]]:
    (found,) = [step["failures"] for step in record["steps"] if step["step"] == name]
    return list(found)


def first(path: Path, text: str) -> dict[str, str]:
    """An environment in which every Python runs this first."""
    path.mkdir()
    (path / "sitecustomize.py").write_text(text)
    return {"PYTHONPATH": str(path)}


@pytest.mark.timeout(1800)
def test_two_hosts_pass_every_step_and_are_named_nowhere(network: Network, tmp_path: Path) -> None:
    """Their folders are not shared, so that checkpoints travel."""
    pair, out = network.hosts[:2], tmp_path / "out"
    out.mkdir()
    pair[1].run("mount", "-t", "tmpfs", "tmpfs", str(out))
    try:
        record = verify(pair, out, code=0)
    finally:
        pair[1].run("umount", str(out))
    assert record["simulated"]
    assert record["emulated"]
    text = (out / "verify.json").read_text() + (out / "verify.html").read_text()
    for host in pair:
        names = [host.name, *host.interfaces, *(host.address(rail) for rail in range(3))]
        assert [name for name in (*names, host.ipv6_address(), str(tmp_path)) if name in text] == []
    assert "emulated nodes" in text


@pytest.mark.timeout(900)
def test_a_rail_that_is_cut_or_down_is_named(network: Network, tmp_path: Path) -> None:
    pair = network.hosts[:2]
    with network.cut(pair[0], rail=1):
        record = verify(pair, tmp_path / "cut", "--only", "nodes", code=1)
    seen = " ".join(failure["seen"] for failure in failures(record, "nodes"))
    # In the report the second interface of each host is another nic.
    assert "node 0 (node0) cannot reach node 1 (node1) over nic1 - nic" in seen
    with network.down(pair[1], rail=1):
        record = verify(pair, tmp_path / "down", "--only", "nodes", code=1)
    seen = " ".join(failure["seen"] for failure in failures(record, "nodes"))
    assert "node 1 (node1) has 2, and there nic4 is down" in seen
    assert all(failure["remedy"] for failure in failures(record, "nodes"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("package", ["versions of megatron-core", "releases of PyTorch"])
def test_another_release_on_one_host_is_named(
    network: Network, tmp_path: Path, package: str
) -> None:
    changed = first(tmp_path / "changed", TORCH if "PyTorch" in package else "")
    if "core" in package:
        core = tmp_path / "changed" / "megatron" / "core"
        core.mkdir(parents=True)
        (core / "__init__.py").write_text("")
        (core / "package_info.py").write_text('__version__ = "2.99.0"\n')
    environs = (PLAYED[0], PLAYED[1] | changed)
    pair = network.hosts[:2]
    record = verify(pair, tmp_path / "out", "--only", "nodes", environs=environs, code=1)
    (found,) = [f for f in failures(record, "nodes") if f"different {package}" in f["seen"]]
    assert "node 1 (node1): 2.99.0" in found["seen"]
    assert "install one on all" in found["remedy"]


@pytest.mark.timeout(900)
def test_a_wrong_operator_of_one_vendor_is_named(network: Network, tmp_path: Path) -> None:
    environs = (PLAYED[0] | first(tmp_path / "wrong", WRONG_OPERATOR), PLAYED[1])
    record = verify(
        network.hosts[:2],
        tmp_path / "out",
        "--only",
        "nodes",
        "operators",
        environs=environs,
        code=1,
    )
    found = failures(record, "operators")
    assert found
    for failure in found:
        assert "node 0 (node0, amd)" in failure["seen"]
        assert "output_layer" in failure["seen"]
    marked = {d["what"] for d in record["differs_from_simulated"] if d["seen"] == "beyond rounding"}
    assert any(what.startswith("amd, fp32: output_layer") for what in marked)


@pytest.mark.timeout(900)
def test_hosts_of_one_vendor_and_a_wrong_vendor_are_named(network: Network, tmp_path: Path) -> None:
    pair = network.hosts[:2]
    record = verify(
        pair,
        tmp_path / "one",
        "--only",
        "nodes",
        "links",
        environs=(PLAYED[0], PLAYED[0]),
        code=1,
    )
    assert "all are of one: node 0 (node0): amd" in failures(record, "nodes")[0]["seen"]
    assert "not run" in failures(record, "links")[0]["seen"]
    record = verify(
        pair, tmp_path / "other", "--only", "nodes", "--vendors", "amd", "nvidia", code=1
    )
    seen = [failure["seen"] for failure in failures(record, "nodes")]
    assert seen == [
        "node 0 (node0) is cpu, and HETERO_VENDOR has it play amd",
        "node 1 (node1) is cpu, and HETERO_VENDOR has it play nvidia",
    ]


@pytest.mark.timeout(900)
def test_rdma_devices_without_libibverbs_are_named(network: Network, tmp_path: Path) -> None:
    pair = network.hosts[:2]
    with ExitStack() as undone:
        for host in pair:
            # A device of sysfs, without the library that would use it.
            script = (
                "set -e; mkdir -p {0}/net; mount --bind /sys/class/net {0}/net; "
                "mkdir -p {0}/infiniband/mlx5_9/ports/1; mount --rbind {0} /sys/class"
            ).format(tmp_path / host.name)
            host.run("sh", "-c", script)
            undone.callback(host.run, "umount", str(tmp_path / host.name / "net"))
            undone.callback(host.run, "umount", "-l", "/sys/class")
        record = verify(pair, tmp_path / "out", "--only", "nodes", "links", code=1)
    assert any("libibverbs" in f["seen"] + f["remedy"] for f in failures(record, "nodes"))
    found = [
        f for f in failures(record, "links") if "as both nodes have RDMA devices" in f["expected"]
    ]
    assert found
    assert all("libibverbs" in failure["seen"] for failure in found)
