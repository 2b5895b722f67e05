"""The bare links between two vendors: what bounds every operation whose bytes have to cross."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist

import hetero
from hetero.collectives.links import nic_names
from hetero.link.base import Link


class BoundaryLinks:
    """One rank's links across. Each rank of the larger vendor has one, so all ranks take part."""

    def __init__(
        self,
        *,
        rank: int,
        vendors: Sequence[str],
        store: dist.Store,
        device: torch.device,
        timeout: float,
    ) -> None:
        pairs = boundary_pairs(vendors)
        self._count = len(pairs)
        self._sends_first = vendors[rank] == vendors[0]
        self._device = device
        self._links: list[Link] = []
        with ExitStack() as opened:
            for pair in pairs:
                if rank in pair:
                    peer = pair[0] if rank == pair[1] else pair[1]
                    link = hetero.connect(
                        store,
                        rank=rank,
                        peer=peer,
                        device=device,
                        timeout=timeout,
                        nics=nic_names(),
                    )
                    self._links.append(opened.enter_context(link))
            self._opened = opened.pop_all()
        self._out = self._in = torch.empty(0, dtype=torch.uint8, device=device)

    @property
    def transport(self) -> str | None:
        return self._links[0].transport if self._links else None

    def prepare(self, nbytes: int) -> None:
        """Divide a message of this many bytes between the links."""
        part = max(nbytes // self._count, 1)
        self._out = torch.ones(part, dtype=torch.uint8, device=self._device)
        self._in = torch.zeros(part * len(self._links), dtype=torch.uint8, device=self._device)

    def both_ways(self) -> None:
        self._carry(sends=True, receives=True)

    def one_way(self) -> None:
        self._carry(sends=self._sends_first, receives=not self._sends_first)

    def _carry(self, *, sends: bool, receives: bool) -> None:
        works = [link.send(self._out) for link in self._links] if sends else []
        if receives:
            parts = self._in.split(self._out.numel())
            works += [link.recv(part) for link, part in zip(self._links, parts, strict=True)]
        for work in works:
            work.wait()

    def check(self) -> None:
        """Raise what broke a link, or that a message did not come whole."""
        for link in self._links:
            link.check()
        if not bool((self._in == 1).all()):
            raise RuntimeError("a message between the vendors was changed on its way")

    def close(self) -> None:
        self._opened.close()


def boundary_pairs(vendors: Sequence[str]) -> list[tuple[int, int]]:
    """Each rank of the larger vendor with one of the other, evenly."""
    first = [rank for rank, vendor in enumerate(vendors) if vendor == vendors[0]]
    second = [rank for rank, vendor in enumerate(vendors) if vendor != vendors[0]]
    larger, smaller = sorted((first, second), key=len, reverse=True)
    return [(rank, smaller[place % len(smaller)]) for place, rank in enumerate(larger)]
