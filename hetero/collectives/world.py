"""All ranks of a script together: liveness between them, and on rank 0 their records.

The first group over all ranks that `hetero` makes in a process begins this, and its end ends it.
Nothing waits for it, and it ends no call: which ranks of a group have gone is the matter of
failures.py, which also knows while rank 0 is gone. Training has liveness of its own.
"""

from __future__ import annotations

import os
import secrets
import sys
import weakref
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hetero.collectives.layout import Layout
from hetero.errors import UserError, kind_and_first_line, print_line
from hetero.observe.blame import Surroundings
from hetero.observe.collect import Collector
from hetero.observe.options import requested_endpoint, stall_warning_seconds
from hetero.observe.record import Phase, recorder
from hetero.observe.state import RankDescription, RunDescription
from hetero.observe.watch import StallWatch, serve_request
from hetero.startup.liveness import (
    Liveness,
    LivenessClient,
    LivenessServer,
    RankFailure,
    ServerAddress,
)

if TYPE_CHECKING:
    from hetero.observe.server import MetricsServer


class World:
    """One rank's side. On rank 0 it is made before the ranks meet, so that the view shows who came.

    Nothing here raises: a script goes on without what cannot be had, and is told why.
    """

    def __init__(self, *, rank: int, size: int, liveness: Liveness | None) -> None:
        """`liveness`: None if there is no other rank, or it could not be opened."""
        self._liveness = liveness
        self._process = os.getpid()
        self._group: Any = lambda: None
        self.description = RunDescription(world_size=size)
        self.collector = Collector(recorder()) if rank == 0 else None
        """The records of all ranks; on rank 0."""
        recorder().rank = rank
        if liveness is not None:
            liveness.share_record(lambda: recorder().snapshot().to_json())
            liveness.on_request(partial(serve_request, rank=rank))
        if self.collector is not None and isinstance(liveness, LivenessServer):
            liveness.on_record(self.collector.add)
            liveness.on_report(_add_lost_rank)
        self.view = None if self.collector is None else self._open_view(self.collector)
        """Of rank 0, if HETERO_METRICS_PORT asks for it."""
        self._watch: StallWatch | None = None

    def address_for(self, master: str) -> dict[str, Any] | None:
        """Where the others find rank 0's liveness, for `join_world`; None if nowhere."""
        if not isinstance(self._liveness, LivenessServer):
            return None
        return self._liveness.address_for(master)

    def keep(self, group: dist.ProcessGroup, layout: Layout) -> None:
        """Last as long as a group that was built, at most until this process exits."""
        self.description = RunDescription(
            world_size=layout.size,
            ranks=tuple(
                RankDescription(
                    rank=member.global_rank,
                    host=member.host,
                    vendor=member.vendor,
                    is_simulated=member.simulated,
                )
                for member in layout.members
            ),
        )
        recorder().set_phase(Phase.SCRIPT)
        if self.collector is not None and isinstance(self._liveness, LivenessServer):
            self._watch = self._watch_stalls(self.collector, self._liveness, layout)
        self._group = weakref.ref(group)
        # Also called when the interpreter exits: a script need not destroy its groups.
        weakref.finalize(group, self.close)
        _worlds()[self._process] = self

    def is_of(self, group: dist.ProcessGroup) -> bool:
        return self._group() is group

    def close(self) -> None:
        """Leave: the end of this process is no failure from now on. Idempotent; never waits long.

        Where an exception ends the script, rank 0 is told.
        """
        if os.getpid() != self._process:
            return  # a forked child that exits: its parent is still there
        if _worlds().get(self._process) is self:
            del _worlds()[self._process]
        liveness, self._liveness = self._liveness, None
        if liveness is not None:
            error = getattr(sys, "last_value", None)  # an interactive session goes on after it
            if isinstance(error, Exception) and not hasattr(sys, "ps1"):
                liveness.fail(kind_and_first_line(error))
            liveness.leave()
        if self._watch is not None:
            self._watch.close()
        view, self.view = self.view, None
        if view is not None:
            view.close()

    def _watch_stalls(
        self, collector: Collector, liveness: LivenessServer, layout: Layout
    ) -> StallWatch | None:
        try:
            seconds = stall_warning_seconds(os.environ)
        except UserError as error:
            print_line(f"hetero: warning: no warning of stalls: {error}")
            return None
        names = {
            member.global_rank: f"rank {member.global_rank} on {member.host} ({member.vendor})"
            for member in layout.members
        }
        return StallWatch(
            collector,
            liveness,
            surroundings=Surroundings(names=names),
            warn_after=seconds,
            tell=lambda line: print_line(f"hetero: {line}"),
        )

    def _open_view(self, collector: Collector) -> MetricsServer | None:
        try:
            endpoint = requested_endpoint(os.environ)
            if endpoint is None:
                return None
            # Not needed by scripts without it.
            from hetero.observe.server import MetricsServer

            view = MetricsServer(
                collector,
                describe=lambda: self.description,
                address=endpoint.address,
                port=endpoint.port,
            )
        except Exception as error:
            print_line(f"hetero: warning: no live view: {error}")
            return None
        print_line(f"hetero: live view: {view.url}")
        return view


@cache
def _worlds() -> dict[int, World]:
    """The one of this process, by its pid: a forked child has none."""
    return {}


def own_world() -> World | None:
    """This process's, as long as the group lasts that it began with."""
    return _worlds().get(os.getpid())


def begin_world(rank: int, global_ranks: Sequence[int]) -> World | None:
    """Rank 0's, if a group of these ranks is the first of all; else None. Before the ranks meet."""
    if not dist.is_initialized():
        # The default group is about to be made: an earlier one has been destroyed.
        end_world()
    size = dist.get_world_size() if dist.is_initialized() else len(global_ranks)
    if rank != 0 or len(global_ranks) != size or own_world() is not None:
        return None
    liveness = None
    if size > 1:
        try:
            liveness = LivenessServer(world_size=size, token=secrets.token_hex(16))
        except (OSError, RuntimeError) as error:
            print_line(f"hetero: warning: no records of other ranks on rank 0: {error}")
    return World(rank=rank, size=size, liveness=liveness)


def join_world(told: Mapping[str, Any], *, rank: int, size: int, master: str) -> World:
    """Connect, in a thread, to rank 0, which has told its address."""
    end_world()
    address = ServerAddress.read(told, master=master)
    client = None
    try:
        client = LivenessClient(lambda: address, rank=rank, world_size=size)
    except RuntimeError as error:  # no thread can be started
        print_line(f"hetero: warning: rank 0 gets no records of rank {rank}: {error}")
    return World(rank=rank, size=size, liveness=client)


def end_world(group: dist.ProcessGroup | None = None) -> None:
    """Close this process's, if it has one and that is of `group`, by default of any."""
    world = own_world()
    if world is not None and (group is None or world.is_of(group)):
        world.close()


def _add_lost_rank(failure: RankFailure) -> None:
    """Liveness callback on rank 0."""
    who = f"rank {failure.rank} on {failure.host}"
    recorder().add_incident("rank lost", failure.sentence(who), lost=failure.rank)
