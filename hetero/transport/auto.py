"""`auto`: the fastest path that a real probe passes, and why each faster one was not taken.

The two ends try the paths in one order, fastest first. A path is taken when both have opened it,
sent each other a few messages that span slots, and found every byte as it should be. Otherwise both
leave it, knowing why, and try the next. The last resort is a link that needs no path of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from hetero.transport.base import Link, LinkCounters
from hetero.transport.forward import PATHS, ChannelOptions, open_forward
from hetero.transport.handshake import Meeting, exchange
from hetero.transport.shm import can_share_memory

_PROBE_SECONDS = 20.0
NOT_BUILT = "device-direct: not part of this version"


@dataclass(frozen=True)
class Choice:
    """The link that was taken, and what was said about the faster ones."""

    link: Link
    passed_over: tuple[str, ...]

    def __str__(self) -> str:
        reasons = "; ".join(self.passed_over)
        return f"{self.link.description}: {self.link.transport} ({reasons})"


def open_auto(
    meeting: Meeting,
    *,
    options: ChannelOptions,
    device: torch.device,
    last_resort: Callable[[], Link],
) -> Choice:
    """Open the fastest link that works between the two ends. Collective between them."""
    passed_over = [NOT_BUILT]
    shared = can_share_memory(meeting)
    for path in PATHS:
        if path == "shm" and not shared:
            passed_over.append("shm: the two ends run on different hosts")
            continue
        attempt = replace(meeting, name=f"{meeting.name}/{path}", timeout=_PROBE_SECONDS)
        link, reason = _try(attempt, path, options, device)
        theirs = _exchange_verdict(attempt, reason)
        if link is not None and reason is None and theirs is None:
            return Choice(link, tuple(passed_over))
        if link is not None:
            link.close()
        peer = meeting.description.peer
        passed_over.append(f"{path}: {reason}" if reason else f"{path}: rank {peer} says {theirs}")
    return Choice(last_resort(), tuple(passed_over))


def _try(
    meeting: Meeting, path: str, options: ChannelOptions, device: torch.device
) -> tuple[Link | None, str | None]:
    """Open and probe one path; a reason when it will not do."""
    link = None
    try:
        link = open_forward(meeting, options=options, device=device, path=path)
        return link, _probe(link, options, device)
    except Exception as error:  # whatever keeps a path from working keeps it from being chosen
        return link, str(error) or type(error).__name__


def _probe(link: Link, options: ChannelOptions, device: torch.device) -> str | None:
    """Exchange messages of a byte, of a slot and a bit, and of several slots, and compare them."""
    rank, peer = link.description.rank, link.description.peer
    for nbytes in (1, options.chunk_bytes + 1, 3 * options.chunk_bytes):
        sent = link.send(_pattern(rank, nbytes).to(device))
        received = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        link.recv(received).wait()
        sent.wait()
        if not torch.equal(received.cpu(), _pattern(peer, nbytes)):
            return f"{nbytes} bytes arrived changed"
    # What the probe moved is not the run's.
    link.counters = LinkCounters()
    return None


def _pattern(rank: int, nbytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank + nbytes)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def _exchange_verdict(meeting: Meeting, reason: str | None) -> str | None:
    """Tell the other end this one's reason against the path; return the other's."""
    # The other end may still be waiting for what this one never sent.
    patient = replace(meeting, timeout=3 * _PROBE_SECONDS + meeting.description.timeout)
    verdict = exchange(patient, "verdict", {"reason": reason})["reason"]
    return None if verdict is None else str(verdict)
