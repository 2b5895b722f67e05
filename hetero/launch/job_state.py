"""A launcher's part in keeping a job's state in memory: its folder, its server, its copies."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict
from itertools import accumulate, pairwise
from typing import Any

from hetero.errors import HeteroError, print_line
from hetero.launch.rounds import Round
from hetero.recover.choose import Choice, choose
from hetero.recover.history import JobHistory, begin_round, read_attempt
from hetero.recover.node_state import CHOSEN_VARIABLE, Inventory, NodeState
from hetero.recover.partners import partners
from hetero.recover.replication import Peer, Replicator, StateServer, fetch
from hetero.recover.stored_files import iterations


class JobState:
    """Of one launcher, from its start to its end."""

    def __init__(self, host_of_store: str) -> None:
        """Raises UserError if there is nowhere to keep state.

        `host_of_store`: where nodes reach a node that has told no address of its own.
        """
        self._host_of_store = host_of_store
        self._token = secrets.token_hex(16)
        self._state = NodeState.create()
        self._server = StateServer(self._state, token=self._token)
        self._replicators: list[Replicator] = []

    def entry(self) -> Mapping[str, Any]:
        """What the other launchers are told: where the server is, what is here, and how far this
        node's ranks have come in the round that ends."""
        attempt = read_attempt(self._state.folder)
        return {
            "port": self._server.port,
            "token": self._token,
            "inventory": self._state.inventory().to_record(),
            "attempt": None if attempt is None else asdict(attempt),
        }

    def newest(self) -> int | None:
        """The iteration of the newest generation that this node's ranks have written."""
        return max(iterations(self._state.folder), default=None)

    def begin_round(self, formed: Round, node: int) -> None:
        """Fetch what this node lacks of the newest state, and keep copies for its partners.

        Afterwards the environment names the folder to the ranks.
        """
        begin_round(self._state.folder, JobHistory.from_record(formed.history))
        for replicator in self._replicators:
            replicator.close()
        peers = {
            number: Peer(
                number,
                entry.address or self._host_of_store,
                entry.state["port"],
                entry.state["token"],
            )
            for number, entry in enumerate(formed.nodes)
        }
        keepers = partners([entry.vendor for entry in formed.nodes])
        sources = [other for other, keeper in enumerate(keepers) if keeper == node]
        is_restart, chosen = bool(formed.reason), None
        if is_restart:
            choice = _chosen(formed)
            chosen = choice.damaged if choice.iteration is None else choice.iteration
            if self._fetch(choice, node, peers):
                self._state.keep_copies(sources)
        self._replicators = [Replicator(self._state, peers[other]) for other in sources]
        os.environ.pop(CHOSEN_VARIABLE, None)
        os.environ.update(
            self._state.variables(
                job=formed.job, is_restart=is_restart, chosen=chosen, copies_of=sources
            )
        )

    def close(self) -> None:
        for replicator in self._replicators:
            replicator.close()
        self._server.close()
        self._state.close()

    def _fetch(self, choice: Choice, node: int, peers: Mapping[int, Peer]) -> bool:
        """Returns whether this node has the newest state, if there is any in memory."""
        try:
            fetch(self._state, choice, node=node, peers=peers)
            return True
        except HeteroError as error:
            print_line(
                f"hetero.run: warning: {socket.gethostname()} could not fetch the state of "
                f"iteration {choice.iteration} in memory: {error}"
            )
            return False


def _chosen(formed: Round) -> Choice:
    """What is in memory, the same on all nodes; the ranks compare it with what is on disk."""
    inventories = {
        number: Inventory.from_record(entry.state["inventory"])
        for number, entry in enumerate(formed.nodes)
    }
    ends = [0, *accumulate(entry.processes for entry in formed.nodes)]
    ranks = {number: range(*span) for number, span in enumerate(pairwise(ends))}
    return choose(inventories, None, ranks=ranks)
