"""The one ladder: which transports two ends may use, which one is taken, and what is said of it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetero.errors import LinkError
from hetero.link import PATHS
from hetero.link import open as opening
from hetero.link.base import Link, LinkCounters
from hetero.link.handshake import Rendezvous
from hetero.link.nics import Nics
from hetero.link.open import (
    Capabilities,
    ChannelOptions,
    PeerCapabilities,
    open_link,
    open_path,
)
from hetero.link.ring import RingOptions
from tests.hetero.link.conftest import nothing_left_behind
from tests.hetero.link.joined import joined, tried
from tests.hetero.link.test_handshake import both, rendezvous

HOST = {"boot": "a", "network": "n"}
NVIDIA = Capabilities(HOST, gpu="nvidia", stream_wait_missing=None, rdma_missing=None)
AMD = Capabilities(HOST, gpu="amd", stream_wait_missing=None, rdma_missing=None)
CPU = Capabilities(
    HOST, gpu=None, stream_wait_missing="it is a CPU", rdma_missing="it has no RDMA device"
)


def ends(
    here: Capabilities, there: Capabilities, device: str = "cpu", **options: Any
) -> PeerCapabilities:
    return PeerCapabilities(here, there, ChannelOptions(**options), torch.device(device))


def elsewhere(situation: Capabilities) -> Capabilities:
    return replace(situation, host={**HOST, "boot": "b"})


def test_two_gpus_of_one_kind_in_one_host_may_use_every_path() -> None:
    assert [ends(NVIDIA, NVIDIA).unavailable_reason(path) for path in PATHS] == [None] * len(PATHS)


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
        (
            NVIDIA,
            replace(NVIDIA, stream_wait_missing="streams do not wait"),
            "ipc",
            "streams do not wait",
        ),
    ],
)
def test_what_stands_in_the_way_is_said_alike_at_both_ends(
    here: Capabilities, there: Capabilities, path: str, reason: str
) -> None:
    said = ends(here, there).unavailable_reason(path)
    assert reason in str(said)
    assert ends(there, here).unavailable_reason(path) == said


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[RingOptions]:
    """The options of the links that are opened meanwhile, which are none."""
    found: list[RingOptions] = []

    def opened(rendezvous: object, options: RingOptions, **paths: object) -> SimpleNamespace:
        found.append(options)
        return SimpleNamespace(detail="")

    monkeypatch.setattr(opening, "GpuDevice", lambda device: "ordered")
    monkeypatch.setattr(opening, "HostDevice", lambda device, checksum: "host")
    monkeypatch.setattr(opening, "open_shared_memory", opened)
    monkeypatch.setattr(opening, "open_tcp", opened)
    return found


@pytest.mark.parametrize("path", ["shm", "tcp"])
@pytest.mark.parametrize(("missing", "kind"), [(None, "ordered"), ("streams do not wait", "host")])
def test_a_gpu_whose_streams_cannot_wait_is_served_by_the_hosts_and_the_link_says_why(
    path: str, missing: str | None, kind: str, given: list[RingOptions]
) -> None:
    capabilities = ends(NVIDIA, replace(AMD, stream_wait_missing=missing), "cuda:0")
    link = open_path(path, rendezvous(0, dist.HashStore()), capabilities)
    assert given[0].device == kind
    assert link.detail == (f"copied by CPU threads ({missing})" if missing else "")


@pytest.mark.parametrize(
    ("path", "sizes", "expected"),
    [
        ("ipc", {}, (256 << 20, 64 << 20)),
        ("shm", {}, (64 << 20, 4 << 20)),
        ("shm", {"chunk_bytes": 1 << 20}, (64 << 20, 1 << 20)),
    ],
)
def test_a_link_takes_no_more_memory_than_its_rings(
    path: str, sizes: dict[str, int], expected: tuple[int, int], given: list[RingOptions]
) -> None:
    capabilities = ends(NVIDIA, NVIDIA, "cuda:0", ring_bytes=64 << 20, **sizes)
    open_path(path, rendezvous(0, dist.HashStore()), capabilities)
    assert (2 * given[0].ring_bytes, given[0].chunk_bytes) == expected


def test_a_path_that_cannot_be_is_refused_before_anything_is_opened() -> None:
    with pytest.raises(LinkError, match=r"cannot use ipc: .* GPUs.*--hetero-transport auto") as no:
        open_path("ipc", rendezvous(0, dist.HashStore()), ends(CPU, CPU))
    assert no.value.exit_code == 2


def test_an_address_that_no_other_host_can_call_is_refused_before_it_is_tried() -> None:
    here = replace(CPU, addresses=("127.0.1.1",))
    there = replace(CPU, addresses=("10.0.0.2",))
    capabilities = ends(here, replace(there, host=HOST | {"network": "another"}))
    reason = capabilities.unavailable_reason("tcp")
    assert reason is not None
    assert "only the loopback address 127.0.1.1" in reason
    assert ends(here, there).unavailable_reason("tcp") is None


def test_sizes_with_which_nothing_could_move_are_refused_all_at_once() -> None:
    with pytest.raises(ValueError, match=r"ring_bytes 600 .*; chunk_bytes 0 .*; connections 0 "):
        ChannelOptions(ring_bytes=600, chunk_bytes=0, connections=0)
    sizes: dict[str, Any] = {"ring_bytes": 1e6, "chunk_bytes": "64K", "connections": 33}
    with pytest.raises(ValueError, match=r"1000000\.0 is no .*'64K' is .*33 .* from 1 to 32"):
        ChannelOptions(**sizes)


OPTIONS = ChannelOptions(ring_bytes=1 << 20, chunk_bytes=64 << 10)


def choose(ours: Rendezvous, transport: str = "auto") -> Any:
    """What `auto`, or another transport, gives an end."""
    return open_link(transport, ours, options=OPTIONS, device=torch.device("cpu"))


def broken(path: str, *, on_rank: int):
    """open_path in which one path cannot be opened by one of the ends."""

    def open_or_fail(path: str, ours: Rendezvous, capabilities: PeerCapabilities) -> Link:
        if path in broken_paths and ours.description.rank == on_rank:
            raise LinkError(f"{path} is broken here")
        return open_path(path, ours, capabilities)

    broken_paths = path.split()
    return open_or_fail


def test_what_the_probe_moved_is_not_counted() -> None:
    with joined(choose) as links:
        assert [link.counters for link in links] == [LinkCounters(), LinkCounters()]


def test_the_first_message_after_the_probe_has_the_first_number() -> None:
    with joined(choose) as (one, other):
        one.send(torch.zeros(3))
        with pytest.raises(LinkError, match=r"message 0 has shape \(3,\) instead of \(4,\)"):
            other.recv(torch.zeros(4)).wait()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_path_that_one_end_cannot_open_is_left_by_both(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "_PROBE_SECONDS", 2.0)
    monkeypatch.setattr(opening, "open_path", broken("shm", on_rank=rank))
    with joined(choose) as links:
        assert [link.transport for link in links] == ["tcp", "tcp"]
        assert "shm: shm is broken here" in links[rank].choice()


def test_tcp_is_opened_again_where_it_fails_and_has_several_rails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One may be lost after it was found to answer; the second time it is left out."""
    tries = itertools.count()

    def fail_once(path: str, ours: Rendezvous, capabilities: PeerCapabilities) -> Link:
        if path == "tcp" and ours.description.rank == 1 and next(tries) == 0:
            raise LinkError("a rail was lost")
        return open_path(path, ours, capabilities)

    monkeypatch.setattr(opening, "_PROBE_SECONDS", 1.0)
    monkeypatch.setattr(opening, "open_path", fail_once)
    monkeypatch.setattr(PeerCapabilities, "share_memory", False)
    options = replace(OPTIONS, nics=Nics(("127.0.0.1", "127.0.0.2")))
    with joined(
        lambda ours: open_link("auto", ours, options=options, device=torch.device("cpu"))
    ) as links:
        assert "; tcp: a rail was lost)" in links[1].choice()


def test_a_path_that_changes_bytes_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = opening._pattern
    monkeypatch.setattr(PeerCapabilities, "share_memory", False)
    calls = iter(range(10_000))
    monkeypatch.setattr(opening, "_pattern", lambda rank, nbytes: honest(next(calls), nbytes))
    assert "arrived changed" in "".join(map(str, tried(choose)))


def test_where_nothing_works_both_ends_get_all_the_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_PROBE_SECONDS", 1.0)
    monkeypatch.setattr(opening, "open_path", broken("shm tcp", on_rank=1))
    for error in tried(choose):
        assert isinstance(error, LinkError)
        assert error.exit_code == 1, "shm and tcp were tried"
        assert "has no path (ipc: " in str(error)
        assert "tcp: " in str(error)
    assert "tcp: tcp is broken here" in str(error)


@pytest.mark.parametrize("transport", ["device-direct", "ipc", "verbs", "verbs-host"])
def test_a_transport_that_this_machine_does_not_have_is_bad_input(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "rdma_missing", lambda: "it has no RDMA device")
    for error in tried(lambda ours: choose(ours, transport)):
        assert isinstance(error, LinkError)
        assert error.exit_code == 2
        assert "take --hetero-transport auto" in str(error)


def test_a_link_whose_verdict_cannot_be_exchanged_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def exchange(*_: object) -> None:
        raise LinkError("the store is lost")

    monkeypatch.setattr(opening, "_exchange_verdict", exchange)
    with nothing_left_behind():
        assert [*map(str, tried(choose))] == ["the store is lost"] * 2


def test_an_end_that_dies_while_a_path_is_tried_is_waited_for_as_long_as_was_asked() -> None:
    store = dist.HashStore()
    here, there = (rendezvous(rank, store, timeout=1.0, link_timeout=0.5) for rank in range(2))
    error, _ = both(
        lambda: choose(here),
        lambda: PeerCapabilities.of(there, device=torch.device("cpu"), options=OPTIONS),
    )
    assert "rank 1 did not answer within 2 s" in str(error)


def test_ends_on_two_hosts_do_not_try_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeerCapabilities, "share_memory", False)
    with joined(choose) as links:
        assert [link.transport for link in links] == ["tcp", "tcp"]
        assert "shm: the two ends run on different hosts" in links[0].choice()


def test_the_line_of_a_choice_says_how_it_works_on_this_machine() -> None:
    link = SimpleNamespace(
        description="link rank 0 (stage 0) - rank 1 (stage 1)",
        transport="verbs",
        detail="writes are made visible by a read-back over the NIC",
        passed_over=("ipc: the two ends run on different hosts",),
    )
    assert Link.choice(link) == (  # type: ignore[arg-type]
        "link rank 0 (stage 0) - rank 1 (stage 1): verbs, writes are made visible by a read-back "
        "over the NIC (ipc: the two ends run on different hosts)"
    )
