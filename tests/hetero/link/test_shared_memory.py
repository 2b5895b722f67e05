"""Memory that one end makes and hands to the other: whatever fails, no descriptor is left."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import pytest
import torch.distributed as dist

from hetero.link.ring import make_memory, new_event
from hetero.link.shared_memory import exchange_events, share_memory
from tests.hetero.link.conftest import nothing_left_behind
from tests.hetero.link.test_handshake import both_well, rendezvous

SIZES = (4096, 4096, 8192)


@pytest.fixture
def joined() -> Iterator[tuple[socket.socket, socket.socket]]:
    pair = socket.socketpair()
    yield pair
    for end in pair:
        end.close()


@pytest.mark.parametrize("rank", [0, 1], ids=["the-maker", "the-other"])
def test_memory_that_cannot_be_mapped_is_closed(
    joined: tuple[socket.socket, socket.socket], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = []

    def second_fails(descriptor: int, nbytes: int) -> mmap.mmap:
        maps.append(descriptor)
        if len(maps) == 2:
            raise OSError("out of address space")
        return real(descriptor, nbytes)

    real = mmap.mmap
    monkeypatch.setattr(mmap, "mmap", second_fails)
    if rank == 1:
        made = [make_memory(nbytes) for nbytes in SIZES]
        socket.send_fds(joined[0], [b"r"], made)
        for descriptor in made:
            os.close(descriptor)
    with nothing_left_behind(), pytest.raises(OSError, match="out of address space"):
        share_memory(joined[rank], rendezvous(rank, dist.HashStore()), sizes=SIZES)


@pytest.mark.parametrize("failing", ["memfd_create", "ftruncate"])
def test_memory_that_cannot_be_made_leaves_what_was_made_before_closed(
    joined: tuple[socket.socket, socket.socket], failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = getattr(os, failing), []

    def third_fails(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 3:
            raise OSError("no memory is left")
        return real(*arguments)

    monkeypatch.setattr(os, failing, third_fails)
    with nothing_left_behind(), pytest.raises(OSError, match="no memory is left"):
        share_memory(joined[0], rendezvous(0, dist.HashStore()), sizes=SIZES)


def test_ends_write_each_others_events(joined: tuple[socket.socket, socket.socket]) -> None:
    with nothing_left_behind(), ExitStack() as stack:
        events = [new_event(stack) for _ in joined]
        peers = both_well(
            *(
                partial(exchange_events, end, event, stack)
                for end, event in zip(joined, events, strict=True)
            )
        )
        os.eventfd_write(peers[0], 5)
        assert os.eventfd_read(events[1]) == 5
        assert not any(os.get_inheritable(descriptor) for descriptor in (*events, *peers))


def test_a_peer_that_passes_no_event_is_an_error(
    joined: tuple[socket.socket, socket.socket],
) -> None:
    joined[1].sendall(b"e")
    with nothing_left_behind(), ExitStack() as stack:
        event = new_event(stack)
        with pytest.raises(ConnectionError, match="the peer passed no eventfd"):
            exchange_events(joined[0], event, stack)
