"""A link that reads back what its NICs have written works over these devices too.

Soft-RoCE writes host memory and needs no read-back. What is seen here is that a queue pair can be
joined with itself, that it reads this side's slots, and that chunks wait for that.
"""

from __future__ import annotations

import functools
from unittest.mock import patch

import torch

from hetero.transport.verbs.read_back import ReadBack
from tests.hetero.transport.contract import Side, make, run_pair, same_bits, values
from tests.hetero.transport.transports import Transport, open_native_link, open_verbs_link

MESSAGES = 6
NBYTES = (256 << 10) + 3
READING_BACK = Transport(
    "verbs", functools.partial(open_verbs_link, emulated=False, read_back=True)
)


NATIVE = Transport("verbs-native", functools.partial(open_native_link, read_back=True))


def exchanged(side: Side) -> int:
    """Messages both ways at once; how many arrived with every byte."""
    flights = []
    for number in range(MESSAGES):
        ours, theirs = (
            make((NBYTES,), torch.uint8, side.device, seed=2 * number + rank)
            for rank in (side.rank, side.peer)
        )
        target = torch.zeros_like(theirs)
        flights.append((side.link.send(ours), side.link.recv(target), target, theirs))
    right = 0
    for sending, receiving, target, expected in flights:
        receiving.wait()
        sending.wait()
        right += same_bits(target, expected)
    return right


def counted(side: Side) -> int:
    """The same; how many read-backs were answered here."""
    finish = ReadBack.finish
    with patch.object(ReadBack, "finish", autospec=True, side_effect=finish) as answered:
        assert exchanged(side) == MESSAGES
    return int(answered.call_count)


def test_chunks_are_read_back_at_both_ends() -> None:
    reads = values(run_pair(counted, READING_BACK))
    assert min(reads) > 0, reads


def test_the_native_forwarder_reads_back_too() -> None:
    """Its data count as arrived only once they have been read, so that they show that they were."""
    assert values(run_pair(exchanged, NATIVE)) == [MESSAGES, MESSAGES]
