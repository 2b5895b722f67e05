"""The public API: opens a link between two ranks of any program that share a store."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from numbers import Integral, Real

import torch
import torch.distributed as dist

from hetero.link.base import Link, LinkDescription
from hetero.link.handshake import Rendezvous, exchange
from hetero.link.names import FAMILIES, PATHS
from hetero.link.nics import find_nics
from hetero.link.open import ChannelOptions, open_link
from hetero.native.binding import native
from hetero.startup.addresses import address_towards, family_of, reachable_address
from hetero.startup.store import ANSWER_SECONDS, BoundedStore, as_link_error

_log = logging.getLogger(__name__)
_PREFIX = "hetero/connect"
_MAX_TIMEOUT = 2_000_000
"""Seconds, 23 days, that a longer one counts as: a socket's has 31 bits of milliseconds."""


def connect(
    store: dist.Store,
    *,
    rank: int,
    peer: int,
    device: torch.device | str | None = None,
    transport: str = "auto",
    timeout: float = 300.0,
    nics: Sequence[str] = (),
    options: ChannelOptions | None = None,
    check_abort: Callable[[], None] = lambda: None,
) -> Link:
    """Open a link to another rank. Both ranks call it; it blocks until both have.

    Two ranks may open several links: their calls are matched in order. Use the link in a `with`
    block, or close it.

    Args:
        store: any store of torch.distributed that both ranks can reach.
        rank: this rank's number, and `peer` the other's: any two different numbers.
        device: where the tensors are; the current GPU if there is one, else the CPU.
        transport: `auto` for the fastest path that works; a family (`device-direct`,
            `cpu-forward`); or one path: `ipc`, `shm`, `verbs`, `verbs-host`, `tcp`.
        timeout: seconds to wait for the other rank, and before a blocked transfer is an error.
        nics: this rank's network interfaces or RDMA devices; without names, the interface that
            leads to the store's host.
        options: sizes and checks, the same at both ends. Its `nics` are ignored.
        check_abort: called every second while waiting for the other rank; what it raises ends it.

    Raises:
        ValueError: invalid arguments, all in one message.
        LinkError: the link cannot be opened; says what was expected and the remedy. Its `exit_code`
            is 2 where `transport` cannot join these two ranks, else 1.

    The logger `hetero.link.connect` reports at INFO the path taken and why no faster one was.
    """
    # Fail on what is wrong on this rank before waiting for the other.
    problems = _invalid_numbers(rank=rank, peer=peer, transport=transport, timeout=timeout)
    here = _device(device, problems)
    _require_nics(nics, problems)
    if not isinstance(options, ChannelOptions | None):
        problems.append(f"options {options!r} are no hetero.link.open.ChannelOptions")
    if problems or here is None:
        raise ValueError("; ".join(problems))
    native()
    rank, peer = int(rank), int(peer)  # torch takes no other integers, such as NumPy's
    timeout = min(timeout, _MAX_TIMEOUT)
    pair = f"{min(rank, peer)}-{max(rank, peer)}"
    description = LinkDescription(rank=rank, peer=peer, secret="", timeout=timeout)
    limit = min(timeout, ANSWER_SECONDS)
    shared = BoundedStore(dist.PrefixStore(_PREFIX, store), seconds=limit)
    with as_link_error(f"{description} could not be opened"):
        number = shared.add(f"{pair}/opened by {rank}", 1)
    rendezvous = Rendezvous(
        store=shared,
        description=description,
        name=f"{pair}/{number}",
        timeout=timeout,
        check_abort=check_abort,
    )
    # The address is the one from which the peer reaches the store's host.
    with _route_errors(rendezvous, host_of(store)):
        address = address_towards(host_of(store))
    mine = {"address": address, "secret": secrets.token_hex(16), "transport": transport}
    theirs = exchange(rendezvous, "address", mine)
    if theirs["transport"] != transport:
        raise rendezvous.failure(
            f"transport is {transport} here and {theirs['transport']} on rank {peer}",
            "give connect() the same on both",
        )
    secret = (mine if rendezvous.listens else theirs)["secret"]
    with _route_errors(rendezvous, theirs["address"]):
        own = reachable_address(address, [theirs["address"]])
    found = find_nics(nics, own=own, family=family_of(own))
    options = replace(options or ChannelOptions(), nics=found)
    rendezvous = replace(rendezvous, description=replace(description, secret=secret))
    link = open_link(transport, rendezvous, options=options, device=here)
    if transport in FAMILIES:
        _log.info("%s", link.choice())
    return link


@contextmanager
def _route_errors(rendezvous: Rendezvous, host: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise rendezvous.failure(
            f"no address of this host leads to {host!r} ({error.strerror})",
            "see its routes (`ip route`) and MASTER_ADDR, where a store has no host of its own",
        ) from error


def _invalid_numbers(*, rank: int, peer: int, transport: str, timeout: float) -> list[str]:
    problems = [
        f"{name} {number!r} is no whole number"
        for name, number in (("rank", rank), ("peer", peer))
        if not isinstance(number, Integral)
    ]
    if rank == peer:
        problems.append(f"rank {rank} cannot have a link to itself")
    if transport not in (*FAMILIES, *PATHS):
        problems.append(f"transport {transport!r} is none of {', '.join((*FAMILIES, *PATHS))}")
    if not (isinstance(timeout, Real) and timeout > 0):
        problems.append(f"a timeout of {timeout!r} s is no number above 0")
    return problems


def _device(device: torch.device | str | None, problems: list[str]) -> torch.device | None:
    """The device with its index; None, and a problem more, if no link can carry its tensors."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        problems.append(f"device {device!r} is none of cpu, cuda and cuda:NUMBER")
        return None
    if found.type == "cpu":
        return torch.device("cpu")  # as tensors have it, without an index
    if found.type == "cuda" and found.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if found.type != "cuda":
        problems.append(f"a link carries tensors of a CPU or a GPU, not of {found}")
    return found


def _require_nics(nics: Sequence[str], problems: list[str]) -> None:
    if isinstance(nics, str):
        problems.append(f"nics {nics!r} is one word; give a list of names")
    elif nics and not (isinstance(nics, list | tuple) and all(type(n) is str for n in nics)):
        problems.append(f"nics {nics!r} is no list of names")
    elif nics:
        try:
            find_nics(nics, own="")
        except ValueError as error:
            problems.append(str(error))


def host_of(store: dist.Store) -> str:
    """The store's host, which every rank reaches; MASTER_ADDR for a store without one."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        return str(store.host)
    return os.environ.get("MASTER_ADDR", "127.0.0.1")
