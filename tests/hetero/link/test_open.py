"""Which transports two ends may use, which one is taken, and `hetero.connect`."""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.two_tensor import TwoTensor

import hetero
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
from hetero.native import binding
from hetero.native.binding import native
from tests.hetero.link.conftest import nothing_left_behind
from tests.hetero.link.joined import joined, tried
from tests.hetero.link.test_handshake import both, both_well, rendezvous

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
def test_gpu_without_stream_waits_falls_back_to_the_host_with_a_reason(
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
    with pytest.raises(ValueError, match=r"1000000\.0 must .*'64K' must .*33 .* between 1 and 32"):
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


FEW_FILES = """
import os, resource, threading
import torch.distributed as dist
import hetero

def open_link(rank):
    try:
        hetero.connect(store, rank=rank, peer=1 - rank, device="cpu", transport="tcp", timeout=10)
    except hetero.LinkError as error:
        print(error, flush=True)

store = dist.HashStore()
limit = len(os.listdir("/proc/self/fd")) + 6
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
threads = [threading.Thread(target=open_link, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
os._exit(0)
"""
"""Both ends of a link, which needs more files than that."""


def opened(store: dist.Store, **options: Any) -> list[Any]:
    return both_well(
        lambda: hetero.connect(store, rank=3, peer=7, device="cpu", **options),
        lambda: hetero.connect(store, rank=7, peer=3, device="cpu", **options),
    )


def test_two_ranks_send_each_other_tensors_of_any_shape_and_dtype() -> None:
    one, other = opened(dist.HashStore())
    with one, other:
        for sent in (
            torch.arange(12.0).view(3, 4),
            torch.tensor(7),
            torch.ones(0, dtype=torch.int8),
        ):
            received = torch.empty_like(sent)
            one.send(sent)
            other.recv(received).wait()
            assert torch.equal(received, sent)
        assert one.transport == other.transport == "shm"
        assert str(one.description) == "link rank 3 - rank 7"


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_rings_of_any_size_have_whole_pages(transport: str) -> None:
    """As where the memory of one link is split among three or six."""
    options = ChannelOptions(ring_bytes=(1 << 20) // 6)
    one, other = opened(dist.HashStore(), transport=transport, options=options)
    with one, other:
        received = torch.zeros(1 << 18)
        one.send(torch.ones(1 << 18))
        other.recv(received).wait()
        assert received.all()


def test_what_was_taken_and_why_nothing_faster_was_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="hetero.link.open"):
        for link in opened(dist.HashStore()):
            link.close()
    assert sorted(record.getMessage() for record in caplog.records) == [
        f"link rank {one} - rank {other}: shm (ipc: it joins GPUs, and the tensors are on a CPU)"
        for one, other in ((3, 7), (7, 3))
    ]


def test_a_link_is_closed_at_the_end_of_its_block() -> None:
    one, other = opened(dist.HashStore(), transport="tcp")
    with one:
        pass
    with pytest.raises(hetero.LinkError, match="rank 3 - rank 7 over tcp: the link is closed"):
        one.send(torch.zeros(1))
    with other, pytest.raises(hetero.LinkError, match="rank 3 has ended or closed the link"):
        other.recv(torch.zeros(1)).wait()


def test_two_ranks_may_have_several_links() -> None:
    store = dist.HashStore()
    first, second = opened(store), opened(store)
    with first[0], first[1], second[0], second[1]:
        second[0].send(torch.tensor([2]))
        first[0].send(torch.tensor([1]))
        for number, links in ((1, first), (2, second)):
            received = torch.zeros(1, dtype=torch.int64)
            links[1].recv(received).wait()
            assert received.item() == number


def test_a_tensor_of_another_device_is_refused_with_the_remedy() -> None:
    one, other = opened(dist.HashStore())
    elsewhere = torch.empty(2, device="meta")
    with one, other:
        for use in (one.send, other.recv):
            with pytest.raises(ValueError, match=r"of cpu, and this one is on meta; move it there"):
                use(elsewhere)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1.0],
        torch.zeros(2).to_sparse(),
        torch.zeros(2).to_mkldnn(),
        torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged),
        TwoTensor(torch.zeros(2), torch.zeros(2)),
    ],
    ids=lambda value: type(value).__name__ + str(getattr(value, "layout", "")),
)
def test_what_has_no_memory_of_its_own_is_refused_and_the_link_goes_on(value: Any) -> None:
    """A tensor that wraps others, as a DTensor, has the address 0."""
    one, other = opened(dist.HashStore())
    with one, other:
        for use in (one.send, other.recv):
            with pytest.raises(ValueError, match=r"link .* carries (tensors|memory), "):
                use(value)
        received = torch.zeros(1)
        one.send(torch.ones(1))
        other.recv(received).wait()
        assert received.item() == 1


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fnuz, torch.float8_e8m0fnu, torch.uint16, torch.complex32]
)
def test_dtypes_of_one_vendor_and_unsigned_ones_are_carried(dtype: torch.dtype) -> None:
    sent = torch.arange(8, dtype=torch.uint8).view(dtype)
    received = torch.zeros(8, dtype=torch.uint8).view(dtype)
    one, other = opened(dist.HashStore())
    with one, other:
        one.send(sent)
        other.recv(received).wait()
    assert torch.equal(received.view(torch.uint8), sent.view(torch.uint8))


def test_a_sender_hears_what_a_receiver_refused_that_closes_the_link_at_once() -> None:
    one, other = opened(dist.HashStore(), transport="tcp")
    with one:
        one.send(torch.zeros(3))
        with pytest.raises(hetero.LinkError, match="shape"), other:
            other.recv(torch.zeros(4)).wait()
        with pytest.raises(hetero.LinkError, match=r"shape \(3,\) instead of \(4,\)"):
            one.recv(torch.zeros(1)).wait()


def test_a_target_whose_memory_is_not_its_values_is_refused() -> None:
    one, other = opened(dist.HashStore())
    with one, other:
        target = torch.zeros(2, dtype=torch.complex64)
        for view in (target.conj(), target.conj().imag):
            with pytest.raises(ValueError, match="recv needs a "):
                other.recv(view)
        one.send(torch.tensor([1 + 2j, 3 - 4j]).conj())
        other.recv(target).wait()
        assert target.tolist() == [1 - 2j, 3 + 4j]


@pytest.mark.parametrize("tag", [-1, 1 << 32, 1.5, "one"])
def test_a_tag_that_is_no_number_of_32_bits_is_refused_and_the_link_goes_on(tag: Any) -> None:
    one, other = opened(dist.HashStore())
    with one, other:
        for use in (one.send, other.recv):
            with pytest.raises(ValueError, match=f"tag {tag!r} must be an integer between 0 and"):
                use(torch.zeros(1), tag=tag)
        received = torch.zeros(1)
        one.send(torch.ones(1), tag=7)
        other.recv(received, tag=7).wait()
        assert received.item() == 1


def test_a_link_for_which_too_few_files_may_be_open_says_which_limit() -> None:
    """In a process of its own, whose limit it is."""
    done = subprocess.run(
        [sys.executable, "-c", FEW_FILES], capture_output=True, text=True, timeout=120, check=False
    )
    assert "raise the limit of open files (ulimit -n)" in done.stdout, done


def test_all_that_is_wrong_with_the_arguments_is_said_at_once() -> None:
    with pytest.raises(ValueError) as refused:
        hetero.connect(
            dist.HashStore(),
            rank=1,
            peer=1,
            transport="pigeons",
            timeout=0,
            device="gpu",
            nics="eth0",
        )
    for said in (
        *("a link to itself", "'pigeons' must be one of auto", "timeout 0 must be"),
        *("device 'gpu' must be one of cpu, cuda", "nics 'eth0' must be a list"),
    ):
        assert said in str(refused.value)


def test_arguments_of_wrong_types_are_refused_before_anyone_is_waited_for() -> None:
    wrong: dict[str, Any] = {"timeout": None, "device": 0.5, "nics": [1], "options": {"chunk": 1}}
    with pytest.raises(ValueError) as refused:
        hetero.connect(dist.HashStore(), rank=0, peer=1, **wrong)
    for said in (
        *("timeout None must be a number", "device 0.5 must be one of cpu, cuda"),
        *("nics [1] must be a list of names", "options {'chunk': 1} must be a"),
    ):
        assert said in str(refused.value)


def test_numpys_ranks_a_devices_index_and_a_timeout_without_end_are_taken() -> None:
    store = dist.HashStore()
    three, seven = np.int64(3), np.int64(7)
    common: dict[str, Any] = {"device": "cpu:0", "timeout": float("inf"), "transport": "tcp"}
    one, other = both_well(
        lambda: hetero.connect(store, rank=three, peer=seven, **common),
        lambda: hetero.connect(store, rank=seven, peer=three, **common),
    )
    with one, other:
        received = torch.zeros(1)
        one.send(torch.ones(1))
        other.recv(received).wait()
        assert received.item() == 1


def test_a_rank_that_is_no_number_is_refused() -> None:
    """As the variables of a launcher are, where a program does not convert them."""
    rank: Any = "0"
    with pytest.raises(ValueError, match="rank '0' must be an integer"):
        hetero.connect(dist.HashStore(), rank=rank, peer=1, device="cpu")


def test_ranks_that_ask_for_different_transports_are_told_so() -> None:
    store = dist.HashStore()
    errors = both(
        lambda: hetero.connect(store, rank=3, peer=7, device="cpu", transport="shm", timeout=5),
        lambda: hetero.connect(store, rank=7, peer=3, device="cpu", transport="tcp", timeout=5),
    )
    assert "transport is shm here and tcp on rank 7" in str(errors[0])
    assert "transport is tcp here and shm on rank 3" in str(errors[1])


def test_nics_that_are_not_there_are_refused_before_anyone_is_waited_for() -> None:
    with pytest.raises(ValueError, match="nothing0, nothing1 are neither a network interface"):
        hetero.connect(
            dist.HashStore(), rank=0, peer=1, device="cpu", nics=["nothing0", "nothing1"]
        )


def test_a_library_of_other_sources_is_refused_before_anyone_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(binding, "sources_version", lambda: 7)
    native.cache_clear()
    with pytest.raises(hetero.LinkError, match=r"not built from the sources .*; install this"):
        hetero.connect(dist.HashStore(), rank=0, peer=1, device="cpu")


def test_a_store_whose_host_stops_while_the_peer_is_waited_for_is_said_not_to_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class StoppingStore(dist.HashStore):
        def __new__(cls, *_: Any) -> StoppingStore:
            return super().__new__(cls)

        def __init__(self, *_: Any) -> None:
            super().__init__()

        def check(self, *_: Any) -> bool:
            threading.Event().wait(60)
            return False

    monkeypatch.setattr(dist, "PrefixStore", StoppingStore)  # torch's calls no method in Python
    with pytest.raises(hetero.LinkError, match=r"rank 0 - rank 1 could .* has not answered for 1"):
        hetero.connect(dist.HashStore(), rank=0, peer=1, device="cpu", timeout=1)


def test_a_host_to_which_no_address_leads_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store in a file has no host of its own."""
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    with pytest.raises(
        hetero.LinkError, match=r"leads to 'no\.such\.host\.invalid' \(.*\); see .* MASTER_ADDR"
    ):
        hetero.connect(dist.HashStore(), rank=0, peer=1, device="cpu")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_come_is_named_in_time(rank: int) -> None:
    with pytest.raises(
        hetero.LinkError, match=rf"could not be opened: rank {1 - rank} .* within 1 s"
    ):
        hetero.connect(dist.HashStore(), rank=rank, peer=1 - rank, device="cpu", timeout=1)


def test_importing_hetero_does_not_import_torch() -> None:
    """Command lines are checked before torch is."""
    program = "import hetero, sys; print('torch' in sys.modules, hetero.connect.__name__)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False connect\n"


def test_what_hetero_does_not_have_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'disconnect'"):
        _ = hetero.disconnect
