"""One end of a link over TCP, for two hosts: `python -m tests.hosts.link_end RANK STORE NIC...`

Says "open", then sends and receives as many messages as it is told on its stdin, one number a line,
and says what it thinks of them.
"""

from __future__ import annotations

import functools
import logging
import sys
from datetime import timedelta

import torch
from torch.distributed import TCPStore

import hetero
from hetero.link.open import ChannelOptions

NBYTES = 1 << 20
TIMEOUT = 8.0
"""A rail that is silent beside others is lost after a quarter of it."""


def main(rank: int, store_at: str, nics: list[str]) -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
    store = TCPStore(store_at, 29512, 2, rank == 0, timedelta(seconds=120))
    options = ChannelOptions(ring_bytes=8 << 20, chunk_bytes=64 << 10, connections=len(nics))
    how = {"transport": "tcp", "nics": nics, "timeout": TIMEOUT, "options": options}
    link = hetero.connect(store, rank=rank, peer=1 - rank, device="cpu", **how)
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
    """Random bytes, of which each differs from the message before."""
    return _first_message(rank) + number % 256


@functools.cache
def _first_message(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, generator=generator)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
