"""`hetero.connect`: a link for anyone's program."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.two_tensor import TwoTensor

import hetero
from hetero.link.open import ChannelOptions
from hetero.native import binding
from hetero.native.binding import native
from tests.hetero.link.test_handshake import both, both_well

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
            with pytest.raises(ValueError, match=f"tag {tag!r} is no whole number from 0 to 4294"):
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
        *("a link to itself", "'pigeons' is none of auto", "a timeout of 0 s"),
        *("device 'gpu' is none of cpu, cuda", "nics 'eth0' is one word; give a list"),
    ):
        assert said in str(refused.value)


def test_arguments_of_wrong_types_are_refused_before_anyone_is_waited_for() -> None:
    wrong: dict[str, Any] = {"timeout": None, "device": 0.5, "nics": [1], "options": {"chunk": 1}}
    with pytest.raises(ValueError) as refused:
        hetero.connect(dist.HashStore(), rank=0, peer=1, **wrong)
    for said in (
        *("a timeout of None s is no number", "device 0.5 is none of cpu, cuda"),
        *("nics [1] is no list of names", "options {'chunk': 1} are no"),
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
    with pytest.raises(ValueError, match="rank '0' is no whole number"):
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
