"""Creates a process group by its members alone, under a name that the caller gives.

PyTorch's `new_group(use_local_synchronization=True)` names a group after its ranks and the number
of groups that the process has. Members of one group may be in different numbers of others (a first
stage has groups that a middle stage lacks). Their names would differ, and each would wait for the
others for ever. Hence the private function of PyTorch in this file, and only here.
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

    Makes gloo connect lazily, only ranks that communicate. Otherwise it connects all pairs of each
    group: N sockets a rank, and N^3 values read from the store.
    """
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    world = c10d._get_default_group()
    if backend == "cpu:gloo":
        # PyTorch sets none where another backend has been registered, and would warn at exit.
        world._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    _connect_ring_neighbors(world, list(range(world_size)), rank)


def create_group(
    name: str,
    ranks: Sequence[int],
    *,
    backend: str,
    timeout: timedelta,
    vendor: str | None = None,
) -> dist.ProcessGroup:
    """Create a group of these ranks, ascending. Only its members call it, and all of them.

    Never use a `name` for two sets of ranks. Create several groups in the same order on all ranks,
    or members wait for each other for ever. A group of one rank has a store of its own. `vendor` is
    this rank's, for a group of the backend `hetero`.
    """
    if backend == "hetero":
        register()
    rank = dist.get_rank()
    store = c10d._get_default_store() if len(ranks) > 1 else dist.HashStore()
    unique = f"hetero {name}"
    while unique in c10d._world.pg_names.values():
        unique += "'"  # All members have created it equally often.
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
        _connect_ring_neighbors(group, ranks, rank)
    elif backend == "hetero":
        # Open its links now, for the same reason.
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    return group


def _connect_ring_neighbors(group: dist.ProcessGroup, ranks: Sequence[int], rank: int) -> None:
    """Connect to both neighbors of gloo's ring, while a failure still names missing ranks.

    Otherwise the first collective would connect, during training.
    """
    if len(ranks) == 1:
        return
    at = ranks.index(rank)
    token = torch.zeros(1)
    sent = dist.isend(token, ranks[(at + 1) % len(ranks)], group=group)
    dist.recv(torch.empty(1), ranks[at - 1], group=group)
    if sent is not None:
        sent.wait()
