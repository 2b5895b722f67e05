"""The bare paths: sockets in one process, and perftest played by a shell script."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hetero.errors import HeteroError
from hetero.tools.benchmark import limits
from hetero.tools.benchmark.limits import (
    MEMORY_COPY,
    PEER_COPY,
    TO_PINNED,
    PerftestRun,
    SocketPath,
    limit_of,
    open_sockets,
    sockets_name,
)
from hetero.tools.benchmark.link import Messages

CPU = torch.device("cpu")
PERFTEST_OUTPUT = """
                    RDMA_Write BW Test
 Dual-port       : OFF          Device         : mlx5_0
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 65536      1000             390.53             388.40             0.740814
"""


def test_each_transport_has_the_limit_of_its_own_path():
    assert limit_of("shm", on_gpu=False, connections=4) == MEMORY_COPY
    assert limit_of("shm", on_gpu=True, connections=4) == TO_PINNED
    assert limit_of("tcp", on_gpu=True, connections=3) == sockets_name(3)
    assert limit_of("gloo", on_gpu=True, connections=3) == sockets_name(1)
    assert limit_of("ipc", on_gpu=True, connections=4) == PEER_COPY
    assert limit_of("verbs", on_gpu=True, connections=4) == limits.RDMA_WRITE


@pytest.fixture
def sockets(request, tmp_path):
    """Both ends of bare sockets, in one process."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    ends: dict[int, SocketPath] = {}

    def end(rank: int) -> None:
        ends[rank] = open_sockets(
            "bare", rank=rank, connections=request.param, store=store, timeout=20.0
        )

    in_two_threads(end)
    yield ends
    for path in ends.values():
        path.close()


def in_two_threads(step) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(step, (0, 1), timeout=120))


@pytest.mark.parametrize("sockets", [1, 4], indirect=True)
@pytest.mark.parametrize("nbytes", [3, 50_000_001])
def test_bare_sockets_carry_both_directions_at_once_and_queued_messages(sockets, nbytes):
    # Larger than every socket buffer, so that sending and receiving have to overlap.
    messages = {rank: Messages.of(nbytes, rank=rank, device=CPU) for rank in (0, 1)}

    def step(rank: int) -> None:
        sockets[rank].exchange(messages[rank].ours, messages[rank].theirs)

    in_two_threads(step)
    for message in messages.values():
        assert torch.equal(message.theirs, message.expected)
        message.theirs.zero_()

    def queued(rank: int) -> None:
        if rank == 0:
            sockets[0].send_all(messages[0].ours, 2)
        else:
            sockets[1].recv_all(messages[1].theirs, 2)

    in_two_threads(queued)
    assert torch.equal(messages[1].theirs, messages[1].expected)


def test_perftests_gigabits_become_gigabytes(monkeypatch, tmp_path):
    assert limits.parse_rate(PERFTEST_OUTPUT, 65536) == pytest.approx(48.55)
    for output, said in (
        ("Unable to find the Infiniband/RoCE device\n-----\n\n", "Unable to find the Infiniband"),
        ("", "without a word"),
    ):
        with pytest.raises(HeteroError, match=said):
            limits.parse_rate(output, 65536)
    assert "no RDMA device" in (limits.perftest_missing([]) or "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "perftest package" in (limits.perftest_missing(["mlx5_0"]) or "")


def program(folder: Path, body: str) -> None:
    """A stand-in for ib_write_bw. The client is called with an address behind its flags."""
    file = folder / limits.RDMA_WRITE
    file.write_text(f'#!/bin/sh\nfor last in "$@"; do :; done\n{body}\n')
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


SERVER = 'if [ "$last" != 127.0.0.1 ]; then exec sleep 60; fi'


@pytest.fixture
def tools(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_perftest_is_asked_for_one_direction_and_for_both(tools):
    row = "echo ' 65536 1000 390.5 388.40 0.7'"
    program(tools, f'{SERVER}\necho "$@" >> {tools}/calls\n{row}')
    point = limits.measure_write(PerftestRun(("mlx5_0", "mlx5_1")), 65536)
    assert (point.algbw_gb_s, point.both_gb_s) == (pytest.approx(48.55), pytest.approx(48.55))
    one, both = (tools / "calls").read_text().splitlines()
    assert "-d mlx5_1 -s 65536" in one
    assert "-b" not in one.split()
    assert "-b" in both.split()


def test_a_client_that_comes_before_its_server_tries_again(tools):
    tried = f"if [ ! -e {tools}/tried ]; then touch {tools}/tried; echo cannot connect; exit 1; fi"
    program(tools, f"{SERVER}\n{tried}\necho ' 4096 1000 8.0 8.0 0.1'")
    assert PerftestRun(("a", "a")).rate(4096, both=False) == 1.0


def test_perftest_that_hangs_or_fails_is_an_error(tools):
    program(tools, "exec sleep 60")
    with pytest.raises(HeteroError, match="did not end within"):
        PerftestRun(("a", "a"), seconds=0.2).rate(4096, both=False)
    program(tools, "echo 'Failed to create QP'; exit 1")
    with pytest.raises(HeteroError, match="Failed to create QP"):
        PerftestRun(("a", "a")).rate(4096, both=False)


def test_the_gid_is_that_of_roce_v2_with_an_ipv4_address(tmp_path):
    port = tmp_path / "class/infiniband/rxe0/ports/1"
    entries = {
        0: ("IB/RoCE v1", "0000:0000:0000:0000:0000:ffff:0a00:0001"),
        1: ("RoCE v2", "fe80:0000:0000:0000:5054:00ff:fe12:3456"),
        10: ("RoCE v2", "0000:0000:0000:0000:0000:ffff:0a00:0001"),
    }
    for index, (kind, gid) in entries.items():
        for name, text in (("gids", gid), ("gid_attrs/types", kind)):
            (port / name).mkdir(parents=True, exist_ok=True)
            (port / name / str(index)).write_text(text + "\n")
    assert limits.gid_index("rxe0", sys_root=tmp_path) == 10
    assert limits.gid_index("mlx5_0", sys_root=tmp_path) is None
