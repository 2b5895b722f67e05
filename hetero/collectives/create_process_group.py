"""Creates the process groups of the backend `hetero`.

A group within one vendor is PyTorch's own, over NCCL or gloo. Only a group that crosses vendors is
a `HeteroProcessGroup`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions

from hetero.collectives.announce import announce_group
from hetero.collectives.group_links import Link, address_for_gloo, clone, host_of, own_address
from hetero.collectives.presence import Presence
from hetero.collectives.process_group_base import HeteroProcessGroupBase
from hetero.collectives.vendor_layout import Layout, Member
from hetero.errors import LinkError, UserError
from hetero.startup.identity import identify, require_equal
from hetero.startup.store import BoundedStore
from hetero.text import spans


def create_group(options: Any, backend_options: Any = None) -> dist.ProcessGroup:
    """Create this rank's part of a group. Collective; succeeds on all of its members or on none.

    `backend_options`: the vendor that the plan assigns to this rank, if there is a plan.
    """
    global_ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    # PyTorch may reuse the name, and with it the store's keys, of a destroyed group, whose members
    # may have been others.
    names = spans(global_ranks)
    with _building(options.group_id):
        shared = BoundedStore(options.store, seconds=options.timeout.total_seconds())
        incarnation = shared.add(f"incarnation/{names}/{options.group_rank}", 1)
    options.store = dist.PrefixStore(f"incarnation {incarnation} of {names}", options.store)
    rendezvous = _Rendezvous(
        options.store,
        rank=options.group_rank,
        size=options.group_size,
        global_ranks=global_ranks,
        timeout=options.timeout,
    )
    with contextlib.ExitStack() as unless_mixed:
        presence = Presence(size=options.group_size, store_host=host_of(options.store))
        unless_mixed.callback(presence.leave)
        planned = backend_options if isinstance(backend_options, str) else "cpu"
        with _building(options.group_id):
            layout = rendezvous.exchange_identities(planned_vendor=planned, presence=presence)
        group, error = None, None
        # Where a plan names the vendors, its own lines say what is joined.
        is_planned = isinstance(backend_options, str)
        announce = announce_group(options.group_id or "0", layout, is_silent=is_planned)
        try:
            if len(layout.vendors) == 1:
                group = _vendor_group(options, layout)
            else:
                group = _mixed_group(options, layout, presence, announce)
        except Exception as failure:
            error = failure
        with _building(options.group_id):
            rendezvous.confirm_created(error, layout, presence)
        assert group is not None
        if len(layout.vendors) > 1:
            unless_mixed.pop_all()
        return group


def create_subgroup(
    store: dist.Store,
    *,
    rank: int,
    global_ranks: Sequence[int],
    name: str,
    timeout: timedelta,
) -> dist.ProcessGroup:
    """A group for `split_group`, which PyTorch leaves to the group that is split."""
    options = _DistributedBackendOptions()
    options.store, options.timeout, options.group_id = store, timeout, name
    options.group_rank, options.group_size = rank, len(global_ranks)
    options.global_ranks_in_group = list(global_ranks)
    return create_group(options)


def _vendor_group(options: Any, layout: Layout) -> dist.ProcessGroup:
    """PyTorch's own group: the vendor's library for GPU tensors, gloo for CPU tensors."""
    from hetero.collectives.intra_vendor import new_library

    group = dist.ProcessGroup(options.store, layout.rank, layout.size)
    backends = {"cpu": dist.ProcessGroup.BackendType.GLOO}
    if torch.cuda.is_available():
        backends["cuda"] = dist.ProcessGroup.BackendType.NCCL
    group._set_default_backend(list(backends.values())[-1])
    for device_type, kind in backends.items():
        library = new_library(
            device_type,
            dist.PrefixStore(f"{device_type}/", options.store),
            rank=layout.rank,
            size=layout.size,
            timeout=options.timeout,
            address=address_for_gloo(layout),
        )
        library._set_sequence_number_for_group()
        group._register_backend(torch.device(device_type), kind, library)
    return group


def _mixed_group(
    options: Any, layout: Layout, presence: Presence, announce: Callable[[Link], None]
) -> dist.ProcessGroup:
    from hetero.collectives.ddp import support_ddp
    from hetero.collectives.group_communicator import Communicator
    from hetero.collectives.process_group import HeteroProcessGroup

    support_ddp()
    name = options.group_id or "0"

    def new_communicator(device: torch.device) -> Communicator:
        return Communicator(
            layout=layout,
            name=name,
            # A connection of its own: other threads use the caller's, and a wait would block them.
            store=dist.PrefixStore(f"{device.type}/", clone(options.store)),
            device=device,
            timeout=options.timeout,
            presence=presence,
            on_first_crossing=announce,
        )

    return HeteroProcessGroup(
        layout,
        presence,
        name=name,
        store=options.store,
        new_communicator=new_communicator,
        timeout=options.timeout,
    )


@contextlib.contextmanager
def _building(name: str) -> Iterator[None]:
    """Have errors of the group's store and members say which group they have ended."""
    try:
        yield
    except (LinkError, UserError, dist.DistNetworkError) as error:
        raise LinkError(f"group {name} could not be built: {error}") from error


class _Rendezvous:
    """What the members of a group tell each other, through its store, while they create it."""

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        size: int,
        global_ranks: Sequence[int],
        timeout: timedelta,
    ) -> None:
        self._store = BoundedStore(store, seconds=timeout.total_seconds())
        self._rank, self._size = rank, size
        self._global_ranks, self._timeout = global_ranks, timeout
        world = dist.GroupMember.WORLD
        self._require_present: Callable[[int], None] = lambda _: None
        """Raises LinkError if a rank, by its number in the group, is known to have ended."""
        if isinstance(world, HeteroProcessGroupBase):
            self._require_present = lambda member: world.require_present(global_ranks[member])

    def exchange_identities(self, *, planned_vendor: str, presence: Presence) -> Layout:
        """Every member's host, vendor and address. If one cannot tell its own, all fail."""
        own: dict[str, Any] = {}
        try:
            global_rank = self._global_ranks[self._rank]
            identity = identify(
                rank=global_rank,
                local_rank=int(os.environ.get("LOCAL_RANK", global_rank)),
                planned_vendor=planned_vendor,
                flags={},
            )
            own |= {"vendor": identity.vendor, "version": identity.project_version}
            own["simulated"] = identity.simulated
            own["address"] = own_address(presence.store_host), presence.port
        except (UserError, ValueError, OSError) as error:
            own["error"] = str(error)
        identities = self._exchange("identity", own)
        versions = [identity["version"] for identity in identities]
        hosts = {self._global_ranks[rank]: each["host"] for rank, each in enumerate(identities)}
        require_equal(hosts, versions, what="versions of this project")
        members = tuple(
            Member(
                rank=rank,
                global_rank=self._global_ranks[rank],
                host=identity["host"],
                vendor=identity["vendor"],
                address=tuple(identity["address"]),
                simulated=identity["simulated"],
            )
            for rank, identity in enumerate(identities)
        )
        return Layout(members, self._rank)

    def confirm_created(self, error: Exception | None, layout: Layout, presence: Presence) -> None:
        """Return once every member has created its part; fail on all if one could not."""
        self._require_present = lambda member: presence.require(layout.members[member])
        own = {"error": str(error) or type(error).__name__} if error is not None else {}
        try:
            self._exchange("created", own)
        except LinkError as failure:
            raise failure from error

    def _exchange(self, what: str, own: dict[str, Any]) -> list[dict[str, Any]]:
        """Every member's payload, with its host; LinkError if one has an error or does not come."""
        payloads = self._all_gather(what, {**own, "host": socket.gethostname()})
        for global_rank, told in zip(self._global_ranks, payloads, strict=True):
            if "error" in told:
                raise LinkError(f"rank {global_rank} on {told['host']}: {told['error']}")
        return payloads

    def _all_gather(self, what: str, own: dict[str, Any]) -> list[dict[str, Any]]:
        store, everyone = self._store, f"{what}/all"
        keys = [f"{what}/{rank}" for rank in range(self._size)]
        coming = deque(enumerate(keys))

        def require_coming() -> None:
            """Raise LinkError if the first member that is missing has ended."""
            while coming and store.check([coming[0][1]]):
                coming.popleft()
            if not coming:  # the last has died before it could say so
                store.set(everyone, "1")
                return
            rank, key = coming[0]
            try:
                self._require_present(rank)
            except LinkError:
                # One that has left the group since may have left its key before.
                if not store.check([key]):
                    raise

        store.set(keys[self._rank], json.dumps(own))
        # All poll one key: polls for all keys of all ranks would be too many for the store.
        if store.add(f"{what}/count", 1) == self._size:
            store.set(everyone, "1")
        try:
            store.wait([everyone], self._timeout, check_abort=require_coming)
        except dist.DistStoreError as error:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            names = spans(self._global_ranks[rank] for rank in missing)
            seconds = self._timeout.total_seconds()
            raise LinkError(
                f"{names} did not come within {seconds:g} s; see the log there"
            ) from error
        return [json.loads(text) for text in store.multi_get(keys)]
