"""A link speaks the protocol of docs/wire.md, with a peer that has none of our code.

Each peer breaks the rules in its own way in the second half, and the link's end names what it did.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from hetero.errors import LinkError
from hetero.link.base import Link
from hetero.tools.verification.contract import make
from tests.forked_ranks import values
from tests.hetero.link.contract import SECRET, Pair, Side
from tests.hetero.link.transports import SLOWNESS, next_name
from tests.rdma.links import verbs_over
from tests.rdma.pyverbs_peer import Peer
from tests.rdma.rails import Rail

RING, CHUNK = 16 << 10, 1 << 10
SIZES = (0, 1, CHUNK - 1, CHUNK + 1, RING, 7 * RING + 3, 8 * RING - 1)
"""Of the messages each way. They have more than 256 entries and go round the ring many times."""
FILL = 18
"""How many of them fill the ring: those of the first four messages take 3,072 bytes of it."""
SHORT, AMPLE = 0.25 * SLOWNESS, 8.0 * SLOWNESS
GRACE = 8.0 * SLOWNESS
PAUSE = 0.02 * SLOWNESS


def content(number: int, sender: int) -> torch.Tensor:
    return make((SIZES[number],), torch.uint8, torch.device("cpu"), seed=2 * number + sender)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.numpy())


def meet(side: Side) -> Peer:
    """The peer of the link that the other side opens."""
    rail: Rail = side.options["rail"]
    store = side.store.underlying_store  # ends of links meet in that of the pair
    name, device = next_name(side.rank, store), rail.devices[side.rank]
    return Peer(store, name, SECRET, device=device, ring=RING, chunk=CHUNK)


def exchanged(side: Side) -> int:
    """Messages both ways; how many arrived with every byte."""
    if side.rank == 1:
        return peer_exchanged(meet(side))
    sent = [side.link.send(content(number, 0)) for number in range(len(SIZES))]
    targets = [torch.zeros(size, dtype=torch.uint8) for size in SIZES]
    received = [side.link.recv(target) for target in targets]
    for work in (*received, *sent):
        work.wait()
    return sum(torch.equal(target, content(n, 1)) for n, target in enumerate(targets))


def peer_exchanged(peer: Peer) -> int:
    """Without a credit no more than fills the ring comes, and nothing in it is written over."""
    peer.wait(lambda: peer.has_entry(FILL - 1))
    time.sleep(PAUSE)
    peer.poll()
    assert not peer.has_entry(FILL)
    right = sum(peer.receive(n) == bytes_of(content(n, 0)) for n in range(len(SIZES)))
    for number in range(len(SIZES)):
        peer.send(bytes_of(content(number, 1)))
    peer.wait(lambda: peer.credited == peer.sent)
    assert peer.sent > 256
    peer.close()
    return right


def test_messages_of_all_sizes_cross_both_ways_and_keep_to_the_credits(
    pair: Pair, rails: list[Rail]
) -> None:
    """The link's end reads back what comes, which the peer need not know."""
    transport = verbs_over(rails[:1], ring_bytes=RING, chunk_bytes=CHUNK, read_back=True)
    ran = pair.run(exchanged, transport=transport, opened=False, rail=rails[0])
    assert values(ran) == [len(SIZES), len(SIZES)]


# Peers that break a rule.

EIGHT = bytes(range(8))


def credits_too_much(peer: Peer) -> None:
    peer.take()
    peer.credit(2)


def counts_wrong(peer: Peer) -> None:
    peer.put(peer.header(8, sequence=1), 0, EIGHT, 8)


def claims_too_much(peer: Peer) -> None:
    peer.put(peer.header(8, sequence=0), 0, EIGHT, 9)


def writes_outside(peer: Peer) -> None:
    peer.theirs["receiving"] += RING
    peer.put(peer.header(8, sequence=0), 0, EIGHT, 8)


def is_silent(peer: Peer) -> None:
    peer.take()


MISTAKES: dict[Callable[[Peer], None], tuple[str, str]] = {
    credits_too_much: ("was credited with 2 entries and had sent 1", "lost"),
    counts_wrong: ("sequence 1 instead of 0", "fault"),
    claims_too_much: ("a part of 9 bytes at 0, slot 0, where 8 bytes at 0 are missing", "fault"),
    writes_outside: ("the last rail, rxa0:1, is lost", "lost"),
    is_silent: (f"nothing moved for {SHORT:g} s", "fault"),
}
"""What each does, what the link's end says, and in which frame it says so first."""


def send_and_receive(link: Link) -> None:
    """Either may be told of the mistake."""
    link.send(torch.ones(8, dtype=torch.uint8))
    link.recv(torch.zeros(8, dtype=torch.uint8)).wait()


def mistaken(side: Side) -> list[tuple[str, float]] | list[dict[str, object]]:
    """What the link's end raises and after how long, or the first frame that the peer hears."""
    found = []
    for mistake in MISTAKES:
        side.timeout = SHORT if mistake is is_silent else AMPLE
        if side.rank == 0:
            link = side.open()
            began = time.monotonic()
            with pytest.raises(LinkError) as error:
                send_and_receive(link)
            found.append((str(error.value), time.monotonic() - began))
        else:
            peer = meet(side)
            mistake(peer)
            found.append(peer.hear())
            peer.close()
    return found


def test_a_peer_s_mistake_is_a_named_error_at_once_and_silence_one_in_time(
    pair: Pair, rails: list[Rail]
) -> None:
    transport = verbs_over(rails[:1], ring_bytes=RING, chunk_bytes=CHUNK)
    ran = pair.run(mistaken, transport=transport, opened=False, rail=rails[0])
    for (what, frame), (text, seconds), heard in zip(MISTAKES.values(), *values(ran), strict=True):
        assert what in text
        assert "rank 0 (stage 4)" in text
        assert "rank 1 (stage 5)" in text
        assert seconds < (SHORT + GRACE if "nothing moved" in what else AMPLE)
        assert frame in heard, heard
