"""One process group at a time, created by its members alone: what of PyTorch that takes.

`torch.distributed.new_group(use_local_synchronization=True)` is PyTorch's way to leave out who is
no member. It names a group after its ranks and after how many groups the process has. Members of
one group are members of different numbers of others (a first stage has groups that a middle stage
has not), so their names would differ, and each would wait for the others for ever. Here the caller
gives the name, which is why a private function of PyTorch stands in this file, and only here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from hetero.collectives.autoload import register


def open_world(
    backend: str, *, store: dist.Store, rank: int, world_size: int, timeout: timedelta
) -> None:
    """Open the default group. Every rank calls it.

    gloo would connect every rank of every group with every other: N sockets a rank, and N times N
    times N numbers read from the store. Told to be lazy, it connects those who talk to each other.
    """
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    _greet_neighbours(dist.group.WORLD, list(range(world_size)), rank)


def create_group(
    name: str,
    ranks: Sequence[int],
    *,
    backend: str,
    timeout: timedelta,
    vendor: str | None = None,
) -> dist.ProcessGroup:
    """Create a group of these ranks, in rising order. Its members call it, and nobody else.

    `name` is the same on all members, and of no other set of ranks. Whoever is in
    several groups creates them in the order that the others do, or members wait for each other for
    ever. A group of one communicates with nobody, and has a store of its own. `vendor` is the part
    that this rank has in a group of the backend `hetero`.
    """
    if backend == "hetero":
        register()
    rank = dist.get_rank()
    store = c10d._get_default_store() if len(ranks) > 1 else dist.HashStore()
    unique = f"hetero {name}"
    while unique in c10d._world.pg_names.values():
        unique += "'"  # As often as every other member has created it.
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(rank),
        list(ranks),
        dist.Backend(backend),
        store,
        unique,  # type: ignore[arg-type]
        backend_options=vendor if backend == "hetero" else None,
        timeout=timeout,
        group_desc=name,
    )
    c10d._world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
    if backend == "gloo":
        _greet_neighbours(group, ranks, rank)
    elif backend == "hetero":
        # Opens the links, for the same reason.
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    return group


def _greet_neighbours(group: dist.ProcessGroup | None, ranks: Sequence[int], rank: int) -> None:
    """Connect with both neighbours in gloo's ring now, where a failure still names who is missing.

    Otherwise the first collective would, in the midst of training.
    """
    if len(ranks) == 1:
        return
    at = ranks.index(rank)
    token = torch.zeros(1)
    sent = dist.isend(token, ranks[(at + 1) % len(ranks)], group=group)
    dist.recv(torch.empty(1), ranks[at - 1], group=group)
    if sent is not None:
        sent.wait()
