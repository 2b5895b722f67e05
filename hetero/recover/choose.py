"""Chooses what a restart resumes from: the newest state that is whole in memory or on disk."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from hetero.recover.node_state import Generation, Inventory, copies_name, rank_of
from hetero.recover.stored_files import INDEX_FILE, folder_name
from hetero.text import counted


class Level(enum.Enum):
    """Where the state is."""

    MEMORY = "memory"
    DISK = "disk"
    NOTHING = "nothing"


@dataclass(frozen=True)
class Fetch:
    """One file that a node lacks, and who has it."""

    file: str
    node: int
    """May be the node itself, which has it as a copy of another's."""
    folder: str
    """In that node's state: `iter_0000120`, or `of_2/iter_0000120`."""


@dataclass(frozen=True)
class Choice:
    """What to resume from."""

    level: Level
    iteration: int | None
    """None for NOTHING: the job begins as its command line says."""
    reason: str
    """A sentence for the log, without a full stop."""
    digest: str = ""
    """Of the generation's index; empty for the disk."""
    fetches: Mapping[int, tuple[Fetch, ...]] = field(default_factory=dict)
    """What each node has to fetch before its ranks start; for nodes that lack something."""
    holders: Mapping[str, int] = field(default_factory=dict)
    """The node that has each file in its own folder of the generation, once all have fetched."""
    damaged: int | None = None
    """Where nothing whole is left: the newest iteration of which a node has damaged files."""


@dataclass(frozen=True)
class _Place:
    node: int
    folder: str
    generation: Generation


def choose(
    inventories: Mapping[int, Inventory],
    on_disk: int | None,
    *,
    ranks: Mapping[int, Iterable[int]],
) -> Choice:
    """Choose the newest iteration of which every file is held by a node that is there.

    A node fetches what its own ranks have written, where it lacks that, and keeps what it holds as
    copies of others'. So no more than before has to fit there. Any layout may follow: what else its
    ranks read, they read from the holders.

    Args:
        inventories: of the nodes that are there, by their numbers; empty for a node without state.
        on_disk: the newest iteration on disk.
        ranks: of each node, in the round that begins.
    """
    passed_over: list[str] = []
    for iteration, digest in _newest_first(inventories):
        if on_disk is not None and iteration < on_disk:
            break
        places = list(_places(inventories, iteration, digest))
        named = places[0].generation.named
        missing = [file for file in sorted(named) if _holder(places, file, None) is None]
        if not missing:
            fetches = _fetches(inventories, places, named, ranks)
            return Choice(
                Level.MEMORY,
                iteration,
                _reason(places, iteration, on_disk, passed_over),
                digest,
                fetches,
                _holders(places, named, fetches),
            )
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        passed_over.append(f"of iteration {iteration} no node has {missing[0]}{more}")
    why = f" ({'; '.join(passed_over[:2])})" if passed_over else ""
    if on_disk is not None:
        return Choice(
            Level.DISK, on_disk, f"iteration {on_disk} on disk; memory has none as new{why}"
        )
    return Choice(
        Level.NOTHING,
        None,
        f"neither memory nor disk has a whole state{why}",
        damaged=max((one.iteration for one in _all(inventories) if one.damaged), default=None),
    )


def _all(inventories: Mapping[int, Inventory]) -> Iterator[Generation]:
    for inventory in inventories.values():
        for held in (inventory.own, *inventory.copies.values()):
            yield from held


def _newest_first(inventories: Mapping[int, Inventory]) -> list[tuple[int, str]]:
    found = {(one.iteration, one.digest) for one in _all(inventories)}
    return sorted(found, key=lambda one: (-one[0], one[1]))


def _places(inventories: Mapping[int, Inventory], iteration: int, digest: str) -> Iterator[_Place]:
    name = folder_name(iteration)
    for node, inventory in sorted(inventories.items()):
        for one in inventory.own:
            if (one.iteration, one.digest) == (iteration, digest):
                yield _Place(node, name, one)
        for source, held in sorted(inventory.copies.items()):
            for one in held:
                if (one.iteration, one.digest) == (iteration, digest):
                    yield _Place(node, f"{copies_name(source)}/{name}", one)


def _holder(places: list[_Place], file: str, node: int | None) -> _Place | None:
    """A place with a file, of that node itself if there is one."""
    holders = [place for place in places if file in place.generation.present]
    own = [place for place in holders if place.node == node]
    return next(iter(own or holders), None)


def _fetches(
    inventories: Mapping[int, Inventory],
    places: list[_Place],
    named: Iterable[str],
    ranks: Mapping[int, Iterable[int]],
) -> dict[int, tuple[Fetch, ...]]:
    fetches = {}
    for node in sorted(inventories):
        here = [p for p in places if p.node == node and "/" not in p.folder]
        own = set(ranks.get(node, ()))
        lacking = [] if here else [_index_of(places, node)]
        for file in sorted(named):
            if here and file in here[0].generation.present:
                continue
            holder = _holder(places, file, node)
            assert holder is not None
            if holder.node == node or rank_of(file) in own:
                lacking.append(Fetch(file, holder.node, holder.folder))
        if lacking:
            fetches[node] = tuple(lacking)
    return fetches


def _holders(
    places: list[_Place], named: Iterable[str], fetches: Mapping[int, Iterable[Fetch]]
) -> dict[str, int]:
    """A node that has written a file, if it is there, else one that has fetched it."""
    held = {one.file: node for node, each in fetches.items() for one in each}
    for place in places:
        if "/" not in place.folder:
            held |= dict.fromkeys(place.generation.present, place.node)
    return {file: held[file] for file in sorted(named)}


def _index_of(places: list[_Place], node: int) -> Fetch:
    place = next((place for place in places if place.node == node), places[0])
    return Fetch(INDEX_FILE, place.node, place.folder)


def _reason(
    places: list[_Place], iteration: int, on_disk: int | None, passed_over: list[str]
) -> str:
    nodes = sorted({place.node for place in places})
    disk = "the disk has none" if on_disk is None else f"the newest on disk is {on_disk}"
    why = f"; {'; '.join(passed_over[:2])}" if passed_over else ""
    return (
        f"iteration {iteration} in memory, whole on {counted(len(nodes), 'node')} "
        f"({', '.join(map(str, nodes))}); {disk}{why}"
    )
