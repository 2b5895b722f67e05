"""The fastest path that a real probe passes, and why each faster one was not taken.

The two ends try the paths in one order, fastest first. A path is taken when both have opened it,
sent each other a few messages that span slots, and found every byte as it should be. Otherwise both
leave it, knowing why, and try the next. `auto` has a last resort, a link that needs no path of its
own; a family of paths that was asked for by name has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from hetero.errors import LinkError
from hetero.link.base import Link, LinkCounters
from hetero.link.handshake import Meeting, exchange
from hetero.link.paths import ChannelOptions, Pair, open_path

_PROBE_SECONDS = 20.0
_PROBE_SIZES = (1, (2 << 20) + 1, 6 << 20)


@dataclass(frozen=True)
class Choice:
    """The link that was taken, and what was said about the faster ones."""

    link: Link
    passed_over: tuple[str, ...]
    is_last_resort: bool = False

    def __str__(self) -> str:
        reasons = "; ".join(self.passed_over) or "the fastest there is"
        remark = f", {self.link.remark}" if self.link.remark else ""
        line = f"{self.link.description}: {self.link.transport}{remark} ({reasons})"
        if not self.is_last_resort:
            return line
        return (
            f"warning: {line}; every other way failed, and this one is much slower: mend what the "
            "reasons name, or ask for --hetero-transport gloo"
        )


def open_fastest(
    meeting: Meeting,
    paths: Sequence[str],
    *,
    options: ChannelOptions,
    device: torch.device,
    last_resort: Callable[[], Link] | None = None,
) -> Choice:
    """Open the first of `paths` that works between the two ends. Collective between them.

    Raises LinkError, on both, when none does and there is no last resort.
    """
    passed_over: list[str] = []
    pair = Pair.of(meeting, device=device, options=options)
    for path in paths:
        if (obstacle := pair.obstacle(path)) is not None:
            passed_over.append(f"{path}: {obstacle}")
            continue
        attempt = replace(meeting, name=f"{meeting.name}/{path}", timeout=_PROBE_SECONDS)
        link, reason = _try(attempt, path, pair, options, device)
        theirs = _exchange_verdict(attempt, reason)
        if link is not None and reason is None and theirs is None:
            return Choice(link, tuple(passed_over))
        if link is not None:
            link.close()
        peer = meeting.description.peer
        passed_over.append(f"{path}: {reason}" if reason else f"{path}: rank {peer} says {theirs}")
    if last_resort is None:
        raise LinkError(
            f"{meeting.description} has no path of the kind that was asked for "
            f"({'; '.join(passed_over)}); take --hetero-transport auto"
        )
    return Choice(last_resort(), tuple(passed_over), is_last_resort=True)


def _try(
    meeting: Meeting, path: str, pair: Pair, options: ChannelOptions, device: torch.device
) -> tuple[Link | None, str | None]:
    """Open and probe one path; a reason when it will not do."""
    link = None
    try:
        link = open_path(path, meeting, pair=pair, options=options, device=device)
        return link, _probe(link, device)
    except Exception as error:  # whatever keeps a path from working keeps it from being chosen
        return link, str(error) or type(error).__name__


def _probe(link: Link, device: torch.device) -> str | None:
    """Exchange messages of a byte, and of several slots and an odd byte, and compare them."""
    rank, peer = link.description.rank, link.description.peer
    for nbytes in _PROBE_SIZES:
        sent = link.send(_pattern(rank, nbytes).to(device))
        received = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        link.recv(received).wait()
        sent.wait()
        arrived = torch.equal(received.cpu(), _pattern(peer, nbytes))
        link.check()
        if not arrived:
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
