"""Ranks whose processes know of each other's end by liveness, which groups share.

The first group of some ranks that `hetero` makes in a process begins a world, groups of some of
these ranks share it, and it ends with the last of them. That of all ranks of a script also has
their records on rank 0. Training has liveness of its own, which its groups share (`adopt`).

Nothing here ends a call: the group does that which waits for a rank that has exited.

Once the lowest rank of a world has ended, nobody tells the others who exits after it. One that
leaves still says so in the group's store (failures.py). The end of one that is killed then shows in
the links that are open, and at the timeout of whoever waits for it to open another.
"""

from __future__ import annotations

import os
import secrets
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hetero.collectives.layout import Layout
from hetero.errors import LinkError, UserError, kind_and_first_line, print_line
from hetero.observe.blame import Surroundings
from hetero.observe.collect import Collector
from hetero.observe.options import requested_endpoint, stall_warning_seconds
from hetero.observe.record import Phase, recorder
from hetero.observe.state import RankDescription, RunDescription
from hetero.observe.watch import StallWatch, serve_request
from hetero.startup.addresses import PORT_RANGE
from hetero.startup.liveness import (
    Liveness,
    LivenessClient,
    LivenessServer,
    RankFailure,
    ServerAddress,
)

if TYPE_CHECKING:
    from hetero.observe.server import MetricsServer

_CONNECT_SECONDS = 20.0
"""At most, for the rank that serves to answer one that connects."""
_CONNECTED_SECONDS = 30.0
"""After which a rank that is there should have connected to the one that serves."""


class World:
    """One rank's side. On rank 0 it is made before the ranks meet, so that the view shows who came.

    Nothing here raises but `require_alive`: a script goes on without what cannot be had, and is
    told why.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        rank: int,
        liveness: Liveness | None,
        name: str,
        is_of_all: bool = True,
        is_adopted: bool = False,
    ) -> None:
        """
        Args:
            ranks: global ones, ascending. Liveness knows each by its index among them.
            liveness: None if there is no other rank, or it could not be opened.
            name: differs between worlds of the same ranks, and is the same on all of them.
            is_of_all: whether these are all ranks of a script, whose records go to rank 0.
            is_adopted: whether another closes liveness.
        """
        self._is_adopted = is_adopted
        self.name, self.is_of_all = name, is_of_all
        self._numbers = {rank: number for number, rank in enumerate(ranks)}
        self._liveness = liveness
        self._process = os.getpid()
        self._groups: set[int] = set()
        """The groups that share it, by what identifies each while it lasts."""
        self.description = RunDescription(world_size=len(ranks))
        self.collector = Collector(recorder()) if is_of_all and rank == 0 else None
        """The records of all ranks; on rank 0."""
        if is_of_all:
            recorder().rank = rank
        if liveness is not None and not is_adopted:
            liveness.set_names({n: f"rank {rank}" for n, rank in enumerate(ranks)})
        if liveness is not None and is_of_all:
            liveness.share_record(lambda: recorder().snapshot().to_json())
            liveness.on_request(partial(serve_request, rank=rank))
        if isinstance(liveness, LivenessServer) and self.collector is not None:
            liveness.on_record(self.collector.add)
            liveness.on_report(_add_lost_rank)
        self.view = None if self.collector is None else self._open_view(self.collector)
        """Of rank 0, if HETERO_METRICS_PORT asks for it."""
        self._watch: StallWatch | None = None

    def address_for(self, master: str) -> dict[str, Any] | None:
        """Where the others find liveness, for `join_world`; None if nowhere."""
        if not isinstance(self._liveness, LivenessServer):
            return None
        return self._liveness.address_for(master)

    def has(self, ranks: Iterable[int]) -> bool:
        return all(rank in self._numbers for rank in ranks)

    def has_exited(self, rank: int) -> bool:
        """Whether a rank, a global one, has exited, or left this world. Thread-safe."""
        liveness = self._liveness
        return liveness is not None and self._numbers[rank] in liveness.ended()

    def expect(self, layout: Layout) -> None:
        """While its first group is built: who is there, and so is about to connect."""
        members = {self._numbers[member.global_rank]: member for member in layout.members}
        if self._liveness is not None:
            self._liveness.set_names({number: str(m) for number, m in members.items()})
        if isinstance(self._liveness, LivenessServer):
            self._liveness.expect({number: m.host for number, m in members.items()})

    def await_connection(self) -> UserError | None:
        """Wait until this rank is connected, so that its end is noticed. Returns why it is not."""
        try:
            if self._liveness is not None:
                self._liveness.await_connection()
        except UserError as error:
            return error
        return None

    def require_alive(self, rank: int) -> None:
        """Raise LinkError, while a group is built, if a rank has exited or does not connect."""
        liveness, number = self._liveness, self._numbers[rank]
        if liveness is None:
            return
        if number in liveness.ended():
            raise LinkError(f"{liveness.name([number])} has exited or left the group; see its log")
        if number == 0 and liveness.unreachable is not None:
            raise LinkError(liveness.unreachable)
        if not self._is_adopted and number in liveness.never_connected(_CONNECTED_SECONDS):
            raise LinkError(
                f"{liveness.name([number])} has exited, or cannot reach {liveness.name([0])}, to "
                "which it has not connected; see its log, or open the ports between the hosts "
                f"({PORT_RANGE})"
            )

    def keep(self, group: dist.ProcessGroup) -> None:
        """Last as long as a group that was built, at most until this process exits."""
        self._groups.add(id(group))
        # Also called when the interpreter exits: a script need not destroy its groups.
        weakref.finalize(group, self._release, id(group))

    def begin(self, group: dist.ProcessGroup, layout: Layout) -> None:
        """From now on groups share it; `group` is the first, and has the same ranks."""
        if self.is_of_all:
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
        if isinstance(self._liveness, LivenessServer):
            self._liveness.expect({})
        _worlds().setdefault(self._process, []).append(self)
        self.keep(group)

    def release(self, group: dist.ProcessGroup) -> None:
        """A group leaves it. With the last one it ends."""
        self._release(id(group))

    def _release(self, group: int) -> None:
        self._groups.discard(group)
        if not self._groups:
            self.close()

    def close(self) -> None:
        """Leave: the end of this process is no failure from now on. Idempotent; never waits long.

        Where an exception ends the script, rank 0 is told.
        """
        if self._is_adopted or os.getpid() != self._process:
            return  # in a forked child that exits its parent is still there
        worlds = _worlds().get(self._process, [])
        if self in worlds:
            worlds.remove(self)
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
def _worlds() -> dict[int, list[World]]:
    """Those of this process, the oldest first, by its pid: a forked child has none."""
    return {}


def own_world() -> World | None:
    """This process's world of all ranks, as long as it lasts."""
    return next((w for w in _worlds().get(os.getpid(), []) if w.is_of_all), None)


def world_with(ranks: Sequence[int]) -> World | None:
    """The oldest world of this process that has all of these ranks."""
    worlds = _worlds().get(os.getpid(), [])
    return next((world for world in worlds if world.has(ranks)), None)


def adopt(liveness: Liveness, *, rank: int, world_size: int) -> None:
    """Have the groups of this process share liveness that the job has, and closes."""
    world = World(
        range(world_size),
        rank=rank,
        liveness=liveness,
        name="job",
        is_of_all=False,
        is_adopted=True,
    )
    _worlds()[os.getpid()] = [world]


def begin_world(rank: int, global_ranks: Sequence[int]) -> World | None:
    """A world of a group's ranks, if this is the lowest, which serves; else None.

    Before the ranks meet.
    """
    ranks = sorted(global_ranks)
    if rank != ranks[0]:
        return None
    liveness, token = None, secrets.token_hex(16)
    if len(ranks) > 1:
        try:
            liveness = LivenessServer(world_size=len(ranks), token=token)
        except (OSError, RuntimeError) as error:
            print_line(f"hetero: warning: no records of other ranks on rank 0: {error}")
    return World(ranks, rank=rank, liveness=liveness, name=token, is_of_all=is_of_all(ranks))


def join_world(
    told: Mapping[str, Any],
    *,
    rank: int,
    global_ranks: Sequence[int],
    master: str,
    timeout: float,
) -> World:
    """Connect, in a thread, to the lowest of these ranks, which has told its address.

    `timeout`: seconds until the others give up; this rank does so before, and says why.
    """
    ranks = sorted(global_ranks)
    address = ServerAddress.read(told, master=master)
    client = None
    try:
        client = LivenessClient(
            lambda: address,
            rank=ranks.index(rank),
            world_size=len(ranks),
            connect_seconds=min(_CONNECT_SECONDS, timeout / 2),
        )
    except RuntimeError as error:  # no thread can be started
        print_line(f"hetero: warning: rank 0 gets no records of rank {rank}: {error}")
    return World(ranks, rank=rank, liveness=client, name=address.token, is_of_all=is_of_all(ranks))


def is_of_all(ranks: Sequence[int]) -> bool:
    """Whether a group of these ranks, about to be made, is of all ranks of a script."""
    return not dist.is_initialized() or len(ranks) == dist.get_world_size()


def end_worlds() -> None:
    """Close those of this process whose default group is about to be made, if any are left."""
    for world in list(_worlds().get(os.getpid(), [])):
        world.close()


def _add_lost_rank(failure: RankFailure) -> None:
    """Liveness callback on rank 0."""
    who = f"rank {failure.rank} on {failure.host}"
    recorder().add_incident("rank lost", failure.sentence(who), lost=failure.rank)
