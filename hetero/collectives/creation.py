"""Builds the groups of the backend `hetero`.

A group inside one vendor is the vendor's library itself: PyTorch's own process group over NCCL or
gloo. Only a group that crosses vendors is ours.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions

from hetero.cluster import identify
from hetero.collectives.vendor_layout import Layout, Member
from hetero.collectives.work import keep_handles_of_joins
from hetero.errors import LinkError, UserError
from hetero.store import BoundedStore, StoreSilent
from hetero.waiting import spans


def create_group(options: Any, backend_options: Any = None) -> dist.ProcessGroup:
    """Build this rank's end of a group. Collective over its members, on all of them or on none.

    `backend_options`: where there is a plan, the name of the vendor that it gives this rank.
    """
    # PyTorch gives a group the name, and so the keys, of one that was destroyed before.
    turn = options.store.add(f"turn of {options.group_rank}", 1)
    options.store = dist.PrefixStore(f"turn {turn}", options.store)
    meeting = _Meeting(
        options.store,
        rank=options.group_rank,
        size=options.group_size,
        global_ranks=list(options.global_ranks_in_group) or list(range(options.group_size)),
        name=options.group_id,
        timeout=options.timeout,
    )
    layout = meeting.identify(
        planned_vendor=backend_options if isinstance(backend_options, str) else "cpu"
    )
    group, error = None, None
    try:
        if len(layout.vendors) == 1:
            group = _vendor_group(options, layout)
        else:
            keep_handles_of_joins()
            group = _mixed_group(options, layout)
    except Exception as failure:
        error = failure
    meeting.conclude(error)
    assert group is not None
    return group


def create_part(
    store: dist.Store,
    *,
    rank: int,
    global_ranks: Sequence[int],
    name: str,
    timeout: timedelta,
) -> dist.ProcessGroup:
    """A group that PyTorch has not asked the backend for, but a group that it splits."""
    options = _DistributedBackendOptions()
    options.store, options.timeout, options.group_id = store, timeout, name
    options.group_rank, options.group_size = rank, len(global_ranks)
    options.global_ranks_in_group = list(global_ranks)
    return create_group(options)


def _vendor_group(options: Any, layout: Layout) -> dist.ProcessGroup:
    """PyTorch's own group over the vendor's library, and gloo for tensors on a CPU."""
    from hetero.collectives.inside_vendor import new_library

    group = dist.ProcessGroup(options.store, layout.rank, layout.size)
    kinds = {"cpu": dist.ProcessGroup.BackendType.GLOO}
    if torch.cuda.is_available():
        kinds["cuda"] = dist.ProcessGroup.BackendType.NCCL
    group._set_default_backend(list(kinds.values())[-1])
    for device_type, kind in kinds.items():
        library = new_library(
            device_type,
            dist.PrefixStore(f"{device_type}/", options.store),
            rank=layout.rank,
            size=layout.size,
            timeout=options.timeout,
        )
        library._set_sequence_number_for_group()
        group._register_backend(torch.device(device_type), kind, library)
    return group


def _mixed_group(options: Any, layout: Layout) -> dist.ProcessGroup:
    from hetero.collectives.group_communicator import Communicator
    from hetero.collectives.group_links import clone
    from hetero.collectives.process_group import HeteroProcessGroup

    name = options.group_id or "0"

    def new_communicator(device: torch.device) -> Communicator:
        return Communicator(
            layout=layout,
            name=name,
            # The caller's own is used by other threads, and a wait in it would hold them up.
            store=dist.PrefixStore(f"{device.type}/", clone(options.store)),
            device=device,
            timeout=options.timeout,
        )

    return HeteroProcessGroup(
        layout,
        name=name,
        store=options.store,
        new_communicator=new_communicator,
        timeout=options.timeout,
    )


class _Meeting:
    """How the members of a group find out who they are, and that all of them have built it."""

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        size: int,
        global_ranks: Sequence[int],
        name: str,
        timeout: timedelta,
    ) -> None:
        self._store = BoundedStore(store, seconds=timeout.total_seconds())
        self._rank, self._size = rank, size
        self._global_ranks, self._name, self._timeout = global_ranks, name, timeout

    def identify(self, *, planned_vendor: str) -> Layout:
        """Who every member is. A member that cannot tell fails all."""
        word: dict[str, Any] = {}
        try:
            global_rank = self._global_ranks[self._rank]
            identity = identify(
                rank=global_rank,
                local_rank=int(os.environ.get("LOCAL_RANK", global_rank)),
                planned_vendor=planned_vendor,
                flags={},
            )
            word |= {"host": identity.host, "vendor": identity.vendor}
        except UserError as error:
            word["error"] = str(error)
        words = self._exchange("identity", word)
        members = tuple(
            Member(
                rank=rank,
                global_rank=self._global_ranks[rank],
                host=said["host"],
                vendor=said["vendor"],
            )
            for rank, said in enumerate(words)
        )
        return Layout(members, self._rank)

    def conclude(self, error: Exception | None) -> None:
        """Go on where every member has built its end; fail on all where one has not."""
        word = {"error": str(error) or type(error).__name__} if error is not None else {}
        try:
            self._exchange("built", word)
        except LinkError as failure:
            raise failure from error

    def _exchange(self, what: str, word: dict[str, Any]) -> list[dict[str, Any]]:
        try:
            words = self._words(what, word)
        except StoreSilent as error:
            raise LinkError(f"group {self._name} could not be built: {error}") from error
        if failed := {r: said["error"] for r, said in enumerate(words) if "error" in said}:
            rank, reason = next(iter(failed.items()))
            raise LinkError(
                f"group {self._name} could not be built: rank {self._global_ranks[rank]}: {reason}"
            )
        return words

    def _words(self, what: str, word: dict[str, Any]) -> list[dict[str, Any]]:
        """What every member says, once all have."""
        self._store.set(f"{what}/{self._rank}", json.dumps(word))
        keys = [f"{what}/{rank}" for rank in range(self._size)]
        try:
            self._store.wait(keys, self._timeout)
        except RuntimeError as error:
            missing = [r for r, key in enumerate(keys) if not self._store.check([key])]
            names = spans(self._global_ranks[rank] for rank in missing)
            raise LinkError(
                f"group {self._name} could not be built: {names} did not come within "
                f"{self._timeout.total_seconds():g} s; see the log there"
            ) from error
        return [json.loads(text) for text in self._store.multi_get(keys)]
