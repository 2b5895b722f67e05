"""Which paths two ends may try, decided from what each knows of itself."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetero.errors import LinkError
from hetero.link import paths
from hetero.link.names import FAMILIES, PATHS
from hetero.link.paths import ChannelOptions, Pair, Situation, open_path
from tests.hetero.link.test_handshake import both, meeting

HOST = {"boot": "a", "network": "n", "futex": True}
NVIDIA = Situation(HOST, gpu={"vendor": "nvidia", "uuid": "1"}, unordered=None, no_rdma=None)
AMD = Situation(HOST, gpu={"vendor": "amd", "uuid": "2"}, unordered=None, no_rdma=None)
CPU = Situation(HOST, gpu=None, unordered="it is a CPU", no_rdma="it has no RDMA device")


def elsewhere(situation: Situation) -> Situation:
    return replace(situation, host={**HOST, "boot": "b"})


def test_two_gpus_of_one_kind_in_one_host_may_use_every_path() -> None:
    assert [Pair(NVIDIA, NVIDIA).obstacle(path) for path in PATHS] == [None] * len(PATHS)


@pytest.mark.parametrize(
    ("here", "there", "path", "reason"),
    [
        (NVIDIA, elsewhere(NVIDIA), "ipc", "different hosts"),
        (NVIDIA, elsewhere(NVIDIA), "shm", "different hosts"),
        (NVIDIA, AMD, "ipc", "different vendors"),
        (CPU, CPU, "ipc", "on a CPU"),
        (NVIDIA, CPU, "ipc", "on a CPU"),
        (NVIDIA, CPU, "verbs", "no RDMA device"),
        (CPU, NVIDIA, "verbs-host", "no RDMA device"),
        (NVIDIA, replace(NVIDIA, unordered="streams do not wait"), "ipc", "streams do not wait"),
    ],
)
def test_what_stands_in_the_way_is_said_alike_at_both_ends(
    here: Situation, there: Situation, path: str, reason: str
) -> None:
    assert reason in str(Pair(here, there).obstacle(path))
    assert Pair(here, there).obstacle(path) == Pair(there, here).obstacle(path)


def test_two_vendors_in_one_host_share_memory_and_order_their_streams() -> None:
    pair = Pair(NVIDIA, AMD)
    assert pair.obstacle("shm") is None
    assert pair.order_themselves


def test_streams_order_themselves_only_if_both_can() -> None:
    assert not Pair(NVIDIA, replace(AMD, unordered="streams do not wait")).order_themselves
    assert not Pair(NVIDIA, CPU).order_themselves


@pytest.mark.parametrize("path", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("there", "kind", "detail"),
    [
        (AMD, "ordered", ""),
        (replace(AMD, unordered="streams do not wait"), "host", "streams do not wait"),
    ],
)
def test_a_gpu_whose_streams_cannot_wait_is_served_by_the_hosts_and_the_link_says_why(
    path: str, there: Situation, kind: str, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def opened(meeting: object, **options: Any) -> SimpleNamespace:
        given.update(options)
        return SimpleNamespace(remark="")

    monkeypatch.setattr(paths, "GpuOrderedDevice", lambda device: "ordered")
    monkeypatch.setattr(paths, "HostDevice", lambda device, checksum: "host")
    monkeypatch.setattr(paths, "open_ordered", opened)
    monkeypatch.setattr(paths, "open_tcp", opened)
    link = open_path(
        path,
        meeting(0, dist.HashStore()),
        pair=Pair(NVIDIA, there),
        options=ChannelOptions(),
        device=torch.device("cuda"),
    )
    assert given["device"] == kind
    assert detail in link.remark
    assert bool(link.remark) == bool(detail)


@pytest.mark.parametrize(
    ("path", "chunk_bytes", "expected"),
    [("ipc", None, 16 << 20), ("shm", None, 4 << 20), ("shm", 1 << 20, 1 << 20)],
)
def test_a_link_takes_no_more_memory_than_its_rings(
    path: str, chunk_bytes: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(paths, "GpuOrderedDevice", lambda device: None)
    monkeypatch.setattr(
        paths, "open_ordered", lambda meeting, **o: given.update(o) or SimpleNamespace(remark="")
    )
    open_path(
        path,
        meeting(0, dist.HashStore()),
        pair=Pair(NVIDIA, NVIDIA),
        options=ChannelOptions(ring_bytes=64 << 20, chunk_bytes=chunk_bytes),
        device=torch.device("cuda"),
    )
    assert 2 * given["ring_bytes"] == 64 << 20
    assert given["chunk_bytes"] == expected


def test_a_path_that_cannot_be_is_refused_before_anything_is_opened() -> None:
    ours = meeting(0, dist.HashStore())
    with pytest.raises(LinkError, match=r"cannot use ipc: it joins GPUs.*--hetero-transport auto"):
        open_path(
            "ipc",
            ours,
            pair=Pair(CPU, CPU),
            options=ChannelOptions(),
            device=torch.device("cpu"),
        )


def test_two_processes_of_one_host_find_out_that_they_share_memory() -> None:
    store = dist.HashStore()
    pairs = both(
        *[
            lambda rank=rank: Pair.of(
                meeting(rank, store), device=torch.device("cpu"), options=ChannelOptions()
            )
            for rank in (0, 1)
        ]
    )
    assert [pair.share_memory for pair in pairs] == [True, True]


def test_an_address_that_no_other_host_can_call_is_refused_before_it_is_tried() -> None:
    here = replace(CPU, addresses=("127.0.1.1",))
    there = replace(CPU, addresses=("10.0.0.2",))
    pair = Pair(here, replace(there, host=HOST | {"network": "another"}))
    obstacle = pair.obstacle("tcp")
    assert obstacle is not None
    assert "only the loopback address 127.0.1.1" in obstacle
    assert Pair(here, there).obstacle("tcp") is None


def test_every_family_is_made_of_paths_fastest_first() -> None:
    for family in FAMILIES.values():
        assert list(family) == sorted(family, key=PATHS.index)
