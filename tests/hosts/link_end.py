"""One end of a link over TCP, for two hosts: `python -m tests.hosts.link_end RANK STORE ADDRESS...`

Says "open", then sends and receives as many messages as it is told on its stdin, one number a line,
and says what it thinks of them.
"""

from __future__ import annotations

import logging
import sys
from datetime import timedelta

import torch
from torch.distributed import TCPStore

from hetero.device.host import HostDevice
from hetero.link.base import LinkDescription
from hetero.link.handshake import Rendezvous
from hetero.link.ring_options import RingOptions
from hetero.link.tcp import open_tcp

NBYTES = 1 << 20
TIMEOUT = 8.0
"""A rail that is silent beside others is lost after a quarter of it."""


def main(rank: int, store_at: str, addresses: tuple[str, ...]) -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
    store = TCPStore(store_at, 29512, 2, rank == 0, timedelta(seconds=120))
    description = LinkDescription(rank=rank, peer=1 - rank, job="hosts", timeout=TIMEOUT)
    link = open_tcp(
        Rendezvous(store, description, "link", listens=rank == 0, secret=b"hosts"),
        RingOptions("tcp", 4 << 20, 64 << 10, HostDevice(torch.device("cpu"))),
        addresses=addresses,
        rails=len(addresses),
    )
    print("open", flush=True)
    for line in sys.stdin:
        print("whole" if _exchange(link, rank, int(line)) else "changed", flush=True)
    link.close()


def _exchange(link, rank: int, count: int) -> bool:
    """Several under way at once, each way."""
    received = [torch.empty(NBYTES, dtype=torch.uint8) for _ in range(count)]
    works = []
    for number, target in enumerate(received):
        works += [link.send(_message(rank, number)), link.recv(target)]
        if len(works) > 8:
            works.pop(0).wait()
            works.pop(0).wait()
    for work in works:
        work.wait()
    return all(torch.equal(t, _message(1 - rank, n)) for n, t in enumerate(received))


def _message(rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, generator=generator)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], tuple(sys.argv[3:]))
