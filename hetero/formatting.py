"""Numbers, counted nouns and lists of ranks as text."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 rank`, `2 ranks`; `plural` where it is not the noun and an s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def size_text(count: float) -> str:
    """Bytes in the largest binary unit that leaves a number of at least one."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def seconds_text(seconds: float) -> str:
    """Seconds in milliseconds' digits, or in three digits where those would show too little."""
    return f"{seconds:.3f} s" if seconds >= 0.1 else f"{seconds:.3g} s"


def spans(numbers: Iterable[int], noun: str = "rank") -> str:
    """Numbers as ranges: 'rank 3', 'ranks 0-3, 8'."""
    ranges: list[list[int]] = []
    ordered = sorted(numbers)
    for number in ordered:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
    return f"{noun} {text}" if len(ordered) == 1 else f"{noun}s {text}"


def ranks_on_hosts(ranks: Iterable[int], hosts: Mapping[int, str]) -> str:
    """Ranks with those of their hosts that are known, of many the first three.

    'rank 3 on b', 'ranks 8-15 on b, c'.
    """
    ordered = sorted(ranks)
    names = list(dict.fromkeys(hosts[rank] for rank in ordered if rank in hosts))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    where = f" on {', '.join(names[:3])}{more}" if names else ""
    return spans(ordered) + where


def name_ranks(
    ranks: Iterable[int], world_size: int, environ: Mapping[str, str] = os.environ
) -> str:
    """Ranks with their nodes, if the launcher tells them: 'ranks 8-15 (node 1 of 2)'."""
    ranks = sorted(ranks)
    local, nodes = (environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"))
    known = local.isdecimal() and nodes.isdecimal() and int(nodes) > 1
    # If nodes have different numbers of processes, it is not known which rank is on which.
    if not known or int(local) * int(nodes) != world_size:
        return spans(ranks)
    return f"{spans(ranks)} ({spans({rank // int(local) for rank in ranks}, 'node')} of {nodes})"
