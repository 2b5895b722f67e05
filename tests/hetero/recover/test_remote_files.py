"""A rank reads blocks of files that other nodes have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero.errors import HeteroError
from hetero.recover import remote_files, replication
from hetero.recover.node_state import NodeState
from hetero.recover.remote_files import Part, RemoteFiles
from hetero.recover.replication import Holders, Peer, StateServer
from hetero.recover.stored_files import StoredFile, files_of_index
from tests.hetero.recover.played_state import content, rank_file, write_generation

BLOCK = 100
FILE = rank_file(0)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeState]:
    """With a generation, in blocks of BLOCK bytes."""
    for module in (replication, remote_files):
        monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK)
    with NodeState.create(base=tmp_path, say=print) as state:
        write_generation(state.folder, 10, world=1, ranks=[0], block=BLOCK)
        yield state


@pytest.fixture
def stored(node: NodeState) -> StoredFile:
    return files_of_index((node.folder / "iter_0000010" / "index.json").read_text()).files[FILE]


@pytest.fixture
def remote(node: NodeState, tmp_path: Path) -> Iterator[RemoteFiles]:
    server = StateServer(node, token="t")
    holders = Holders(10, "digest", {FILE: 0}, {0: Peer(0, "127.0.0.1", server.port, "t")})
    holders.write(tmp_path)
    read = Holders.read(tmp_path)
    assert read == holders
    files = RemoteFiles(read, tmp_path / "parts")
    yield files
    files.close()
    server.close()


def test_only_the_blocks_that_are_asked_for_are_copied(
    remote: RemoteFiles, stored: StoredFile
) -> None:
    assert FILE in remote
    assert rank_file(1) not in remote
    data, expected = content(0, 10), bytearray(stored.size)
    path = remote.path(FILE)
    remote.bring([Part(FILE, stored, 150, 160)])
    expected[100:200] = data[100:200]
    assert path.read_bytes() == expected
    remote.bring([Part(FILE, stored, 120, 130), Part(FILE, stored, 299, 301)])
    expected[200:400] = data[200:400]
    assert path.read_bytes() == expected
    remote.bring([Part(FILE, stored, 0, stored.size)])
    assert path.read_bytes() == data


def test_a_block_is_copied_once(remote: RemoteFiles, stored: StoredFile, node: NodeState) -> None:
    path = remote.path(FILE)
    remote.bring([Part(FILE, stored, 0, stored.size)])
    (node.folder / "iter_0000010" / FILE).unlink()
    remote.bring([Part(FILE, stored, 0, stored.size)])
    assert path.read_bytes() == content(0, 10)


def test_more_files_than_are_open_at_once_are_brought(
    node: NodeState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replication, "_FILES_AT_ONCE", 2)
    write_generation(node.folder, 20, world=5, ranks=range(5), block=BLOCK)
    index = files_of_index((node.folder / "iter_0000020" / "index.json").read_text())
    server = StateServer(node, token="t")
    peer = Peer(0, "127.0.0.1", server.port, "t")
    files = RemoteFiles(
        Holders(20, index.digest, dict.fromkeys(index.files, 0), {0: peer}), tmp_path / "parts"
    )
    files.bring([Part(name, one, 0, one.size) for name, one in index.files.items()])
    for rank in range(5):
        assert files.path(rank_file(rank)).read_bytes() == content(rank, 20)
    files.close()
    server.close()


def test_a_damaged_block_is_named_with_its_node(
    remote: RemoteFiles, stored: StoredFile, node: NodeState
) -> None:
    path = node.folder / "iter_0000010" / FILE
    data = bytearray(path.read_bytes())
    data[210] ^= 1
    path.write_bytes(data)
    remote.bring([Part(FILE, stored, 0, 200)])
    with pytest.raises(HeteroError, match=r"node 0 at 127\.0\.0\.1.*other bytes.*block 2"):
        remote.bring([Part(FILE, stored, 200, 201)])


def test_closing_removes_the_parts(remote: RemoteFiles, stored: StoredFile) -> None:
    path = remote.path(FILE)
    remote.bring([Part(FILE, stored, 0, 10)])
    assert path.exists()
    remote.close()
    assert not path.parent.exists()
