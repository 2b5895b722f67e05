"""How the members of a group that is being created learn who the others are, and how it ended."""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hetero.collectives.layout import Layout, Member
from hetero.collectives.links import own_address
from hetero.collectives.world import World
from hetero.errors import HeteroError, LinkError, UserError, print_line
from hetero.startup.exchange import Exchange
from hetero.startup.identity import identify, require_equal
from hetero.startup.process import LAUNCHER_VARIABLE, unknown_variables
from hetero.startup.store import BoundedStore, host_of
from hetero.text import counted, spans


@contextlib.contextmanager
def building(name: str) -> Iterator[None]:
    """Have errors of the store and of members say which group could not be built."""
    try:
        yield
    except (HeteroError, dist.DistNetworkError) as error:
        raise LinkError(f"group {name} could not be built: {error}") from error


def exchange_identities(
    store: BoundedStore,
    options: Any,
    global_ranks: Sequence[int],
    *,
    planned_vendor: str,
    world: World | None,
    begun: World | None,
) -> tuple[Layout, set[str], Mapping[str, Any] | None]:
    """Exchange every member's host, vendor and address. If one cannot find its own, all fail.

    Args:
        world: that these ranks already share, as far as this one knows.
        begun: that this rank begins.

    Returns the layout, the names of the worlds that members share, and where the one that a member
    begins is found.
    """
    global_rank = global_ranks[options.group_rank]
    own: dict[str, Any] = {"host": socket.gethostname()}
    try:
        identity = identify(
            rank=global_rank,
            local_rank=int(os.environ.get("LOCAL_RANK", global_rank)),
            planned_vendor=planned_vendor,
            flags={},
        )
        own |= {"vendor": identity.vendor, "version": identity.project_version}
        own["simulated"] = identity.simulated
        store_host = host_of(options.store)
        own["address"] = own_address(store_host)
        own["world"] = "" if world is None else world.name
        if begun is not None and (address := begun.address_for(store_host)) is not None:
            own["liveness"] = address
    except (UserError, ValueError, OSError) as error:
        own["error"] = str(error)
    identities = _exchange(
        store,
        "identities",
        options,
        own,
        name_members=lambda members: spans(global_ranks[member] for member in members),
        require_alive=partial(_require_alive, world, global_ranks),
    )
    for rank, told in zip(global_ranks, identities, strict=True):
        if "error" in told:
            raise LinkError(f"rank {rank} on {told['host']}: {told['error']}")
    hosts = {rank: told["host"] for rank, told in zip(global_ranks, identities, strict=True)}
    versions = [told["version"] for told in identities]
    require_equal(hosts, versions, what="versions of this project")
    members = tuple(
        Member(
            rank=rank,
            global_rank=global_ranks[rank],
            host=told["host"],
            vendor=told["vendor"],
            address=told["address"],
            simulated=told["simulated"],
        )
        for rank, told in enumerate(identities)
    )
    worlds = {told["world"] for told in identities}
    address = next((told["liveness"] for told in identities if "liveness" in told), None)
    return Layout(members, options.group_rank), worlds, address


def exchange_results(
    store: BoundedStore,
    options: Any,
    layout: Layout,
    *,
    error: Exception | None,
    world: World | None,
) -> None:
    """Raise ExchangeError on all members if one has an error, or does not come."""
    _exchange(
        store,
        "results",
        options,
        {},
        error=error,
        name_members=lambda members: ", ".join(str(layout.members[m]) for m in members),
        require_alive=partial(
            _require_alive, world, [member.global_rank for member in layout.members]
        ),
    )


def _exchange(
    store: BoundedStore,
    what: str,
    options: Any,
    own: Mapping[str, Any],
    *,
    error: Exception | None = None,
    name_members: Callable[[Sequence[int]], str],
    require_alive: Callable[[int], None],
) -> list[dict[str, Any]]:
    """Exchange values between the group's members; ExchangeError on all if one does not come.

    `require_alive` raises LinkError if a member is known to have exited.
    """
    exchange = Exchange(
        store,
        what,
        member=options.group_rank,
        size=options.group_size,
        name_members=name_members,
        remedy="see the log there",
    )

    def check() -> None:
        if missing := exchange.absent() or exchange.missing():
            require_alive(missing[0])
        else:  # the last one exited before it could end the exchange, which has all values
            exchange.abort(LinkError("a member exited"))

    exchange.arrive()
    exchange.submit(own, error=error)
    return exchange.wait(options.timeout.total_seconds(), check=check)


def _require_alive(world: World | None, global_ranks: Sequence[int], member: int) -> None:
    if world is not None:
        world.require_alive(global_ranks[member])


def announce(name: str, layout: Layout, *, is_silent: bool) -> str:
    """Prints a group's ranks and transport, which is done for the first group of a process.

    Deferred until the first cross-vendor link opens: the line to print then is returned, without
    the transport. It is empty if there is nothing to print.
    """
    if is_silent or layout.rank != 0 or layout.size == 1:
        return ""
    if LAUNCHER_VARIABLE not in os.environ:
        for sentence in unknown_variables(os.environ):
            print_line(f"hetero: warning: {sentence}")
    counts = Counter((member.vendor, member.simulated) for member in layout.members)
    simulated = " (simulated)" if any(member.simulated for member in layout.members) else ""
    parts = [f"{count} {vendor}" for (vendor, _), count in counts.items()]
    text = f"hetero: group {name} of {counted(layout.size, 'rank')}: {' + '.join(parts)}{simulated}"
    if len(layout.vendors) == 1:
        library = "nccl" if torch.cuda.is_available() else "gloo"
        print_line(f"{text} over {library}")
        return ""
    return text
