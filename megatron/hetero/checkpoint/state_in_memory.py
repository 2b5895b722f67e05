"""State in memory: a checkpoint every few steps in the memory of the launchers, two kept.

--hetero-memory-checkpoint-interval. The copy overlaps with the next steps, as --async-save's does.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hetero.errors import UserError
from hetero.recover.free_memory import free_bytes, held_bytes
from hetero.recover.generations import Generations, copied_nodes, state_folder
from hetero.recover.node_state import STATE_VARIABLE
from hetero.recover.partners import partners
from hetero.text import counted, size_text
from megatron.hetero.checkpoint.destination import NodeFolder
from megatron.hetero.checkpoint.safetensors_writer import WriteItem
from megatron.hetero.checkpoint.save_timing import SaveTimings
from megatron.hetero.checkpoint.saver import Contents, ControlGroup, SaveOutcome, Saver
from megatron.hetero.checkpoint.snapshot import SPARED_BYTES, Snapshot

FLAG = "--hetero-memory-checkpoint-interval"
GENERATIONS = Generations.KEPT + 1
"""At once: the kept ones and the one that is being written."""


def require_state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of this node's launcher. Raises UserError if there is none to write to."""
    host = socket.gethostname()
    folder = state_folder(environ)
    if folder is None:
        raise UserError(
            f"{FLAG} needs a launcher that keeps the state, and {STATE_VARIABLE} is not set on "
            f"{host}; start with python -m hetero.run --hetero-restarts N, or leave the flag out"
        )
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise UserError(
            f"{STATE_VARIABLE} on {host} is {folder}, which is no folder that can be written; "
            f"start with python -m hetero.run --hetero-restarts N, or leave {FLAG} out"
        )
    return folder


@dataclass(frozen=True)
class RankNeed:
    """What one rank says before the run starts."""

    host: str
    folder: str
    vendor: str
    bytes: int
    """Of its file."""
    copies: int
    """Of its state that it makes in host memory besides: one, and one for --async-save."""
    free: int
    """Of its node, with what is in the folder already, which will be replaced."""


def require_room(ranks: Sequence[RankNeed]) -> None:
    """Raise UserError, alike on every rank, if state in memory does not fit on a node.

    A node is a folder on a host. Launchers copy their state to each other as `partners` says.
    """
    nodes: dict[tuple[str, str], list[RankNeed]] = {}
    for rank in ranks:
        nodes.setdefault((rank.host, rank.folder), []).append(rank)
    by_node = list(nodes.values())
    sizes = [sum(rank.bytes for rank in node) for node in by_node]
    holders = partners([node[0].vendor for node in by_node])
    for number, node in enumerate(by_node):
        kept = [size for other, size in enumerate(sizes) if holders and holders[other] == number]
        copies = sum(rank.bytes * rank.copies for rank in node)
        need = GENERATIONS * (sizes[number] + sum(kept)) + copies
        free = max(0, node[0].free - SPARED_BYTES)
        if need > free:
            of_others = (
                f" and of the {counted(len(kept), 'node')} whose state it keeps "
                f"({size_text(sum(kept))})"
                if kept
                else ""
            )
            raise UserError(
                f"{FLAG} needs {size_text(need)} of host memory on {node[0].host}, where "
                f"{size_text(free)} are free for {node[0].folder}: {GENERATIONS} generations of "
                f"{counted(len(node), 'rank')} ({size_text(sizes[number])}){of_others}, and "
                f"{size_text(copies)} for copies; make /dev/shm or the container's memory larger, "
                "spread the model over more nodes, or leave the flag out",
                known_to_all=True,
            )


class StateInMemory:
    """This rank's side of it. Collective, but for `reserve`, `order_updates` and `close`."""

    def __init__(
        self,
        control: ControlGroup,
        snapshot: Snapshot,
        *,
        interval: int,
        local_rank: int,
        say: Callable[[str], None],
    ) -> None:
        """`say` prints a line of the log, on one rank. Raises UserError without a folder."""
        self._folder = NodeFolder(
            require_state_folder(), local_rank=local_rank, copies_of=copied_nodes()
        )
        self._control, self._interval, self._say = control, interval, say
        self._saver = Saver(self._folder, control, snapshot=snapshot)
        self.timings = SaveTimings()
        self._has_reserved = False
        self._count = self._left_out = 0
        self._last_problem: str | None = None

    def require_room(self, *, vendor: str, bytes: int, copies: int) -> None:
        """Refuse a run whose state does not fit. `bytes`: of this rank's file."""
        path = self._folder.path
        mine = RankNeed(
            host=socket.gethostname(),
            folder=str(path),
            vendor=vendor,
            bytes=bytes,
            copies=copies,
            free=free_bytes(path) + held_bytes(path),
        )
        texts = self._control.all_gather_strings(json.dumps(asdict(mine)))
        require_room([RankNeed(**json.loads(text)) for text in texts])

    def begin_run(self, iteration: int) -> None:
        """Forget what an earlier attempt has written after the iteration that is resumed from."""
        self._folder.begin_run(iteration)

    def due(self, iteration: int) -> bool:
        """Whether to begin a generation: once the one before is written, and copied by all nodes.

        Training would wait for the writing. Without the copies no generation may be left of which a
        lost node's part is on another node.
        """
        if iteration % self._interval != 0:
            return False
        waits = self._saver.is_writing or (
            self._folder.is_writer and self._folder.generations.awaits_copies()
        )
        if any(self._control.all_gather_ints(int(waits))):
            self._left_out += 1
            return False
        return True

    def reserve(self, write_items: Callable[[], Sequence[WriteItem]]) -> None:
        """Allocate memory for copies in a thread, the first time."""
        if not self._has_reserved:
            self._has_reserved = True
            self._saver.reserve(write_items())

    def order_updates(self) -> None:
        """Make updates enqueued from now on wait for a copy under way."""
        self._saver.order_updates()

    def save(self, iteration: int, contents: Contents) -> None:
        """Start a generation, after the one before it. A failure is a warning."""
        with self.timings.blocking():
            outcome = self._saver.finish()
        self._report(outcome)
        self.timings.begin(iteration)
        with self.timings.blocking():
            self._saver.start(iteration, contents)

    def poll(self) -> None:
        """Once per step."""
        with self.timings.blocking():
            outcome = self._saver.poll()
        self._report(outcome)

    def finish(self) -> None:
        """Wait for the generation that is being written, and say what all have cost."""
        with self.timings.blocking():
            outcome = self._saver.finish()
        self._report(outcome)
        if self._count:
            left_out = f", {self._left_out} left out while others were kept" * (self._left_out > 0)
            self._say(
                f"state in memory: {counted(self._count, 'generation')}{left_out}; training stood "
                f"still for {self.timings.total_s:.3f} s in all"
            )

    def close(self) -> None:
        self._saver.close()

    def _report(self, outcome: SaveOutcome | None) -> None:
        if outcome is None:
            return
        part = outcome.part
        self.timings.end(
            memory_wait_s=outcome.memory_wait_s,
            written_s=None if part is None else part.seconds,
            bytes=None if part is None else part.bytes,
        )
        if outcome.problem is None:
            self._count += 1
            if self._count == 1 or self._last_problem is not None:
                self._say(
                    f"state in memory: iteration {outcome.iteration}, {size_text(outcome.bytes)} "
                    f"on all nodes together, and from now on every {self._interval} steps"
                )
            self._last_problem = None
        elif outcome.problem != self._last_problem:
            self._last_problem = outcome.problem
            self._say(
                f"warning: the state of iteration {outcome.iteration} could not be kept in memory "
                f"({outcome.problem}); what is kept of earlier iterations stays"
            )
