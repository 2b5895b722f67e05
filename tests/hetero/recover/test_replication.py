"""State travels between two nodes: whole, compared, and to nobody else."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero.errors import HeteroError
from hetero.recover import replication, stored_files
from hetero.recover.choose import choose
from hetero.recover.node_state import Inventory, NodeState
from hetero.recover.replication import (
    Holders,
    Peer,
    Replicator,
    StateClient,
    StateServer,
    fetch,
)
from hetero.recover.stored_files import folder_name
from tests.hetero.recover.played_state import content, rank_file, write_generation
from tests.sentences import sentence_of

TOKEN = "secret of the job"


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[NodeState]]:
    made = [NodeState.create(base=tmp_path, say=print) for _ in range(2)]
    yield made
    for state in made:
        state.close()


@pytest.fixture
def peers(nodes: list[NodeState]) -> Iterator[dict[int, Peer]]:
    servers = [StateServer(state, token=TOKEN) for state in nodes]
    yield {n: Peer(n, "127.0.0.1", one.port, TOKEN) for n, one in enumerate(servers)}
    for server in servers:
        server.close()


def copy_of(state: NodeState, node: int, iteration: int, rank: int) -> bytes:
    return (state.folder / f"of_{node}" / folder_name(iteration) / rank_file(rank)).read_bytes()


def test_a_server_tells_what_its_node_has_and_sends_blocks(nodes, peers, tmp_path: Path) -> None:
    write_generation(nodes[0].folder, 10, world=2, ranks=[0])
    path, data = f"iter_0000010/{rank_file(0)}", content(0, 10)
    with StateClient(peers[0]) as client, (tmp_path / "got").open("w+b") as got:
        assert client.inventory() == nodes[0].inventory()

        def copy(path: str, *, begin: int, size: int) -> int:
            buffer = memoryview(bytearray(100))
            return client.copy_block(path, file=got.fileno(), begin=begin, size=size, buffer=buffer)

        assert copy(path, begin=300, size=300) == zlib.crc32(data[300:600])
        assert got.read() == bytes(300) + data[300:600]
        with pytest.raises(HeteroError, match=f"damaged state: {path} ends at byte {len(data)}"):
            copy(path, begin=len(data) - 10, size=11)
    with StateClient(peers[0]) as client, pytest.raises(HeteroError, match="no longer has iter_"):
        client.text(f"iter_0000010/{rank_file(1)}")


@pytest.mark.parametrize(
    "request_",
    [{"token": "other", "ask": "inventory"}, {"ask": "inventory"}, [], {"token": 7}],
)
def test_a_stranger_is_told_nothing(peers, request_: object) -> None:
    with socket.create_connection(("127.0.0.1", peers[0].port), timeout=30) as stranger:
        stranger.sendall(json.dumps(request_).encode() + b"\n")
        assert stranger.recv(1) == b""


@pytest.mark.parametrize("noise", [b"\x16\x03\x01" * 40 + b"\n", b"x" * 10_000])
def test_noise_is_answered_with_the_end_of_the_connection(peers, noise: bytes) -> None:
    with socket.create_connection(("127.0.0.1", peers[0].port), timeout=30) as stranger:
        stranger.sendall(noise)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""


@pytest.mark.parametrize(
    "path", ["owner.lock", "../x", "iter_0000010/../owner.lock", "/etc/passwd"]
)
def test_nothing_but_state_can_be_asked_for(peers, path: str) -> None:
    with StateClient(peers[0]) as client:
        assert "no such request" in sentence_of(client.text, path, error=HeteroError)


def test_a_partner_keeps_the_two_newest_generations(nodes, peers) -> None:
    write_generation(nodes[0].folder, 10, world=2, ranks=[0])
    replicator = Replicator(nodes[1], peers[0], poll_seconds=0.01, say=print)
    try:
        for iteration in (10, 20, 30):
            write_generation(nodes[0].folder, iteration, world=2, ranks=[0])
            wait_for(lambda iteration=iteration: replicator.newest == iteration)
        wait_for(lambda: [one.iteration for one in nodes[1].copies_of(0)] == [30, 20])
        assert copy_of(nodes[1], 0, 30, 0) == content(0, 30)
    finally:
        replicator.close()


def test_copies_of_a_lost_node_stay_and_one_line_says_that_it_is_gone(nodes) -> None:
    server = StateServer(nodes[0], token=TOKEN)
    peer = Peer(0, "127.0.0.1", server.port, TOKEN)
    write_generation(nodes[0].folder, 10, world=2, ranks=[0])
    said: list[str] = []
    replicator = Replicator(nodes[1], peer, poll_seconds=0.01, say=said.append)
    try:
        wait_for(lambda: replicator.newest == 10)
        server.close()
        wait_for(lambda: replicator.problem is not None)
        assert replicator.newest == 10
    finally:
        replicator.close()
    (line,) = said
    assert "node 0" in line


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of a block, of which a file then has several."""
    for module in (replication, stored_files):
        monkeypatch.setattr(module, "BLOCK_BYTES", 100)
    return 100


def test_files_of_many_blocks_are_copied_and_fetched_whole(nodes, peers, small_blocks) -> None:
    write_generation(nodes[0].folder, 10, world=3, ranks=range(3), block=small_blocks)
    replicator = Replicator(nodes[1], peers[0], poll_seconds=0.01, say=print)
    wait_for(lambda: replicator.newest == 10)
    replicator.close()
    assert [copy_of(nodes[1], 0, 10, rank) for rank in range(3)] == [
        content(rank, 10) for rank in range(3)
    ]
    shutil.rmtree(nodes[1].folder / "of_0")
    resume(nodes, peers, node=1, ranks={0: [], 1: [0, 1, 2]})
    assert nodes[1].generations() == nodes[0].generations()


def test_one_damaged_block_of_many_is_named(nodes, peers, small_blocks) -> None:
    write_generation(nodes[0].folder, 10, world=2, ranks=[0, 1], block=small_blocks)
    path = nodes[0].folder / "iter_0000010" / rank_file(1)
    data = bytearray(path.read_bytes())
    data[3 * small_blocks] ^= 1
    path.write_bytes(data)
    said = sentence_of(resume, nodes, peers, node=1, error=HeteroError)
    assert f"node 0 at 127.0.0.1:{peers[0].port} holds damaged state" in said
    assert f"{rank_file(1)} has other bytes than were written (block 3)" in said
    assert nodes[1].generations() == ()


def test_damaged_state_is_not_chosen_again(nodes, peers, small_blocks, capsys) -> None:
    for iteration in (10, 20):
        write_generation(nodes[0].folder, iteration, world=2, ranks=[0, 1], block=small_blocks)
    damaged = f"iter_0000020/{rank_file(1)}"
    path = nodes[0].folder / damaged
    data = bytearray(path.read_bytes())
    data[3 * small_blocks] ^= 1
    path.write_bytes(data)
    with StateClient(peers[0]) as client:
        client.compare(damaged, 2)  # another block
    assert nodes[0].generations()[0].present == {rank_file(0), rank_file(1)}
    sentence_of(resume, nodes, peers, node=1, error=HeteroError)
    newest = nodes[0].generations()[0]
    assert (newest.present, newest.damaged) == ({rank_file(0)}, {rank_file(1)})
    said = f"{damaged} in memory is damaged and not used any more: {rank_file(1)} has other bytes"
    assert said in capsys.readouterr().err
    resume(nodes, peers, node=1)
    (here,) = nodes[1].generations()
    assert here.iteration == 10


@pytest.mark.parametrize("block", [7, -1, None, "0"])
def test_what_cannot_be_compared_is_still_used(nodes, peers, small_blocks, block: Any) -> None:
    write_generation(nodes[0].folder, 10, world=1, ranks=[0], block=small_blocks)
    with StateClient(peers[0]) as client, contextlib.suppress(HeteroError):
        client.compare(f"iter_0000010/{rank_file(0)}", block)
    assert nodes[0].generations()[0].present == {rank_file(0)}


def test_a_file_that_replaces_a_damaged_one_meanwhile_is_used(
    nodes, peers, small_blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_generation(nodes[0].folder, 10, world=1, ranks=[0], block=small_blocks)
    folder = nodes[0].folder / "iter_0000010"
    (folder / rank_file(0)).write_bytes(b"")

    def replaced(*how: Any) -> Any:
        problem = stored_files.block_problem(*how)
        shutil.rmtree(folder)
        write_generation(nodes[0].folder, 10, world=1, ranks=[0], block=small_blocks)
        return problem

    monkeypatch.setattr(replication, "block_problem", replaced)
    with StateClient(peers[0]) as client:
        client.compare(f"iter_0000010/{rank_file(0)}", 0)
    assert nodes[0].generations()[0].present == {rank_file(0)}


def test_what_does_not_come_in_time_is_named(nodes, peers) -> None:
    write_generation(nodes[0].folder, 10, world=1, ranks=[0])
    choice = choose({0: nodes[0].inventory(), 1: Inventory()}, None, ranks={1: [0]})
    with pytest.raises(HeteroError, match=f"node 0 .* did not send {rank_file(0)} in time"):
        fetch(nodes[1], choice, node=1, peers=peers, seconds=-1)
    assert nodes[1].generations() == ()


def test_a_replicator_stops_while_the_other_node_is_silent(nodes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        peer = Peer(0, "127.0.0.1", silent.getsockname()[1], TOKEN)
        said: list[str] = []
        replicator = Replicator(nodes[1], peer, say=said.append)
        connection, _ = silent.accept()
        with connection:
            assert connection.recv(1), "it asks, and waits for the answer"
            replicator.close()
            wait_for(lambda: not replicator.is_running)
    assert said == []


def test_a_copy_that_fails_leaves_nothing_behind(nodes) -> None:
    server = StateServer(nodes[0], token=TOKEN)
    peer = Peer(0, "127.0.0.1", server.port, TOKEN)
    index = json.loads('{"sha256": "x", "checkpoint": {"files": {}}}')
    index["checkpoint"]["files"][rank_file(0)] = [len(content(0, 10)), []]
    write_generation(nodes[0].folder, 10, world=1, ranks=[0])
    (nodes[0].folder / "iter_0000010" / "index.json").write_text(json.dumps(index))
    said: list[str] = []
    replicator = Replicator(nodes[1], peer, poll_seconds=0.01, say=said.append)
    wait_for(lambda: replicator.problem is not None)
    replicator.close()
    server.close()
    assert "rank_00000.safetensors has too few checksums" in said[0]
    assert list((nodes[1].folder / "of_0").iterdir()) == []


def test_a_spare_without_state_takes_no_copy_from_its_partner(nodes, peers) -> None:
    write_generation(nodes[1].folder / "of_0", 10, world=2, ranks=[0])
    replicator = Replicator(nodes[1], peers[0], poll_seconds=0.01, say=print)
    try:
        time.sleep(0.2)
        assert replicator.newest == 10
    finally:
        replicator.close()


def test_a_node_that_has_all_of_a_generation_copies_none_of_it(nodes, peers) -> None:
    """As after a restart, when every node has fetched what it lacked."""
    for state in nodes:
        write_generation(state.folder, 10, world=2, ranks=[0, 1])
    replicator = Replicator(nodes[1], peers[0], poll_seconds=0.02)
    write_generation(nodes[0].folder, 20, world=2, ranks=[0])
    wait_for(lambda: replicator.newest == 20)
    replicator.close()
    assert [one.iteration for one in nodes[1].copies_of(0)] == [20]


def test_what_an_abandoned_attempt_left_makes_room_for_the_next(nodes, peers) -> None:
    for iteration in (110, 120):
        write_generation(nodes[1].folder / "of_0", iteration, world=2, ranks=[0])
    write_generation(nodes[0].folder, 100, world=2, ranks=[0])
    replicator = Replicator(nodes[1], peers[0], poll_seconds=0.01, say=print)
    try:
        wait_for(lambda: [one.iteration for one in nodes[1].copies_of(0)] == [100])
        write_generation(nodes[0].folder, 110, world=2, ranks=[0], attempt="second")
        wait_for(lambda: replicator.newest == 110)
        assert copy_of(nodes[1], 0, 110, 0) == content(0, 110, "second")
        digest = write_generation(nodes[0].folder, 110, world=2, ranks=[0], attempt="third")
        wait_for(lambda: nodes[1].copies_of(0)[0].digest == digest)
    finally:
        replicator.close()


def test_a_damaged_file_is_not_kept_as_a_copy(nodes, peers) -> None:
    write_generation(nodes[0].folder, 10, world=1, ranks=[0])
    write_generation(nodes[0].folder, 20, world=1, ranks=[0])
    path = nodes[0].folder / "iter_0000020" / rank_file(0)
    path.write_bytes(bytes(len(path.read_bytes())))
    said: list[str] = []
    replicator = Replicator(nodes[1], peers[0], poll_seconds=0.01, say=said.append)
    try:
        wait_for(lambda: replicator.problem is not None)
        assert replicator.newest == 10
    finally:
        replicator.close()
    assert "rank_00000.safetensors has other bytes" in said[0]


def resume(
    nodes: list[NodeState],
    peers: dict[int, Peer],
    *,
    node: int,
    ranks: Mapping[int, Sequence[int]] | None = None,
) -> None:
    """`ranks`: of each node; by default those of its number."""
    inventories = {n: state.inventory() for n, state in enumerate(nodes)}
    choice = choose(inventories, None, ranks=ranks or {n: [n] for n in inventories})
    fetch(nodes[node], choice, node=node, peers=peers)


def test_nothing_moves_where_every_node_has_what_its_ranks_have_written(nodes, peers) -> None:
    for node in range(2):
        write_generation(nodes[node].folder, 10, world=2, ranks=[node])
    for node in range(2):
        resume(nodes, peers, node=node)
        assert nodes[node].generations()[0].present == {rank_file(node)}
        holders = Holders.read(nodes[node].folder)
        assert holders is not None
        other = 1 - node
        assert (holders.iteration, holders.files) == (10, {rank_file(other): other})
        assert holders.peers == {other: peers[other]}


def test_a_node_fetches_what_its_ranks_have_written_elsewhere(nodes, peers) -> None:
    for node in range(2):
        write_generation(nodes[node].folder, 10, world=2, ranks=[node])
    resume(nodes, peers, node=0, ranks={0: [1], 1: [0]})
    folder = nodes[0].folder / "iter_0000010"
    assert [(folder / rank_file(r)).read_bytes() for r in range(2)] == [
        content(0, 10),
        content(1, 10),
    ]


def test_a_spare_gets_the_lost_nodes_files_from_its_partner(nodes, peers) -> None:
    write_generation(nodes[0].folder, 10, world=2, ranks=[0])
    write_generation(nodes[0].folder / "of_1", 10, world=2, ranks=[1])
    for node in (1, 0):
        resume(nodes, peers, node=node)
        folder = nodes[node].folder / "iter_0000010"
        assert (folder / rank_file(1)).read_bytes() == content(1, 10)
    assert nodes[1].generations()[0].present == {rank_file(1)}
    own = nodes[0].folder / "iter_0000010" / rank_file(1)
    copy = nodes[0].folder / "of_1" / "iter_0000010" / rank_file(1)
    assert own.samefile(copy), "takes no memory of its own"


def test_a_copy_that_has_become_the_nodes_own_is_still_sent(nodes, peers) -> None:
    """A node that is ready first removes copies that it no longer keeps, while others fetch."""
    write_generation(nodes[0].folder, 10, world=2, ranks=[0])
    write_generation(nodes[0].folder / "of_1", 10, world=2, ranks=[1])
    inventories = {n: state.inventory() for n, state in enumerate(nodes)}
    choice = choose(inventories, None, ranks={0: [0], 1: [1]})
    fetch(nodes[0], choice, node=0, peers=peers)
    nodes[0].keep_copies([])
    fetch(nodes[1], choice, node=1, peers=peers)
    folder = nodes[1].folder / "iter_0000010"
    assert (folder / rank_file(1)).read_bytes() == content(1, 10)


def test_an_interrupted_fetch_leaves_no_thread_that_writes(
    nodes, peers, small_blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_generation(nodes[0].folder, 10, world=1, ranks=[0], block=small_blocks)
    choice = choose({0: nodes[0].inventory(), 1: Inventory()}, None, ranks={1: [0]})
    copy_block, is_interrupted = StateClient.copy_block, threading.Event()

    def copied(client: StateClient, path: str, **of_block: Any) -> int:
        if threading.current_thread() is threading.main_thread():
            is_interrupted.set()
            raise KeyboardInterrupt
        assert is_interrupted.wait(60)
        return copy_block(client, path, **of_block)

    monkeypatch.setattr(StateClient, "copy_block", copied)
    with pytest.raises(KeyboardInterrupt):
        fetch(nodes[1], choice, node=1, peers=peers)
    assert not [thread for thread in threading.enumerate() if thread.name == "state copy"]
    assert nodes[1].generations() == ()


def test_after_another_start_nothing_is_said_of_older_holders(nodes, peers) -> None:
    write_generation(nodes[0].folder, 10, world=2, ranks=[0])
    write_generation(nodes[1].folder, 10, world=2, ranks=[1])
    resume(nodes, peers, node=0)
    assert Holders.read(nodes[0].folder) is not None
    nothing = choose({0: Inventory()}, None, ranks={0: [0]})
    fetch(nodes[0], nothing, node=0, peers=peers)
    assert Holders.read(nodes[0].folder) is None


def test_what_a_partner_has_already_is_linked_into_the_copy(nodes, peers) -> None:
    """As after a restart with three nodes, each of which holds another's files."""
    write_generation(nodes[0].folder, 10, world=3, ranks=[0, 2])
    write_generation(nodes[1].folder, 10, world=3, ranks=[1, 0])
    replicator = Replicator(nodes[1], peers[0], poll_seconds=0.01, say=print)
    try:
        wait_for(lambda: replicator.newest == 10)
    finally:
        replicator.close()
    copies, own = nodes[1].folder / "of_0" / "iter_0000010", nodes[1].folder / "iter_0000010"
    assert (copies / rank_file(0)).samefile(own / rank_file(0))
    assert (copies / rank_file(2)).read_bytes() == content(2, 10)


def test_a_damaged_file_ends_a_fetch_and_names_the_node(nodes, peers) -> None:
    for node in range(2):
        write_generation(nodes[node].folder, 10, world=2, ranks=[node])
    path = nodes[1].folder / "iter_0000010" / rank_file(1)
    path.write_bytes(bytes(len(path.read_bytes())))
    moved = {0: [1], 1: [0]}
    said = sentence_of(resume, nodes, peers, node=0, ranks=moved, error=HeteroError)
    assert "node 1 at 127.0.0.1" in said
    assert "rank_00001.safetensors has other bytes" in said
    assert [one.present for one in nodes[0].generations()] == [{rank_file(0)}]


def test_a_server_that_is_gone_is_named(nodes, peers) -> None:
    for node in range(2):
        write_generation(nodes[node].folder, 10, world=2, ranks=[node])
    gone = {**peers, 1: replace(peers[1], port=1)}
    moved = {0: [1], 1: [0]}
    said = sentence_of(resume, nodes, gone, node=0, ranks=moved, error=HeteroError)
    assert "node 1 at 127.0.0.1:1" in said
