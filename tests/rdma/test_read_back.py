"""A link that reads back what its NICs have written works over these devices too.

Soft-RoCE writes host memory and needs no read-back. What is seen here is that a queue pair can be
joined with itself and reads this side's ring: data count as arrived only once they have been read.
"""

from __future__ import annotations

import functools

import torch

from tests.forked_ranks import values
from tests.hetero.link.contract import Pair, Side, make, same_bits
from tests.hetero.link.transports import Transport, open_rdma

MESSAGES = 6
NBYTES = (256 << 10) + 3
READING_BACK = Transport("verbs", functools.partial(open_rdma, read_back=True))


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


def test_data_that_are_read_back_arrive_at_both_ends(pair: Pair) -> None:
    assert values(pair.run(exchanged, transport=READING_BACK)) == [MESSAGES, MESSAGES]
