"""Copies state between the launchers of two nodes, while the job trains and after a loss.

A `StateServer` shows a node's folder to whoever has the token of the job, a `Replicator` keeps a
copy of another node's generations, and `fetch` gets what a node lacks before its ranks start again.
Files move in blocks over several connections; each block is compared with its checksum while it is
in the cache. Bytes move by sendfile and in large reads, without Python's lock. No torch.

A request is one line of JSON, {"token", "ask", ...}; the answer a line {"bytes": N} and N bytes, or
{"error": why}, after which the server closes the connection. `ask` is "inventory", "file" (a part
of one) or "compare": a block had other bytes than its index says. If it has them here, the file is
not used any more.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import shutil
import socket
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hetero.errors import HeteroError, print_line
from hetero.recover.choose import Choice, Fetch
from hetero.recover.node_state import (
    RANK_FILE,
    Inventory,
    NodeState,
    copies_name,
    file_identity,
    mark_damaged,
)
from hetero.recover.stored_files import (
    BLOCK_BYTES,
    INDEX_FILE,
    SAVING,
    NamedFiles,
    StoredFile,
    block_problem,
    files_of_index,
    folder_name,
)
from hetero.startup.addresses import keep_alive, listen_everywhere

KEPT = 2
"""Generations of a node that its partner keeps."""
_PATH = re.compile(rf"(of_\d+/)?iter_\d{{7,}}/(index\.json|{RANK_FILE.pattern})")
_STREAMS = 8
"""Connections over which files come, a block at a time on each."""
_FILES_AT_ONCE = 128
"""Files that are open while blocks are written to them."""
_BUFFER_BYTES = 1 << 20
"""Stays in a core's cache between its arrival, its checksum and the copy into the file."""
_LARGEST_LINE = 4096
_REQUEST_SECONDS = 5.0
"""For a whole request to arrive: strangers are not waited for."""
_CONNECT_SECONDS = 10.0
_IDLE_SECONDS = 60.0
"""A connection on which nothing is asked, or nothing moves, is closed."""
_LOOK_SECONDS = 0.5
_CONNECTIONS = 512
"""At once: after a loss every node may open `_STREAMS` to one."""
_PART = ".part"
_HOLDERS_FILE = "holders.json"


@dataclass(frozen=True)
class Peer:
    """Another node's StateServer."""

    node: int
    host: str
    port: int
    token: str
    """Of the job; secret."""

    def __str__(self) -> str:
        return f"node {self.node} at {self.host}:{self.port}"


@dataclass(frozen=True)
class Holders:
    """Who has the files of a generation that a node's own folder of it lacks."""

    iteration: int
    digest: str
    """Of the generation's index."""
    files: Mapping[str, int]
    """The node, by file."""
    peers: Mapping[int, Peer]

    def write(self, folder: Path) -> None:
        """For the ranks of this node: into its state. Raises OSError."""
        record = asdict(self)
        record["peers"] = [asdict(peer) for peer in self.peers.values()]
        (folder / _HOLDERS_FILE).write_text(json.dumps(record))

    @classmethod
    def read(cls, folder: Path) -> Holders | None:
        """What the launcher has written; None where every file is here."""
        try:
            record = json.loads((folder / _HOLDERS_FILE).read_text())
        except FileNotFoundError:
            return None
        peers = [Peer(**peer) for peer in record.pop("peers")]
        return cls(**record, peers={peer.node: peer for peer in peers})

    @staticmethod
    def remove(folder: Path) -> None:
        (folder / _HOLDERS_FILE).unlink(missing_ok=True)


class StateServer:
    """Shows a node's state from threads of its own until `close`."""

    def __init__(self, state: NodeState, *, token: str) -> None:
        """Listens at all addresses, on a free `port`."""
        self._state, self._token = state, token.encode()
        self._listener = listen_everywhere(backlog=_CONNECTIONS)
        self._listener.settimeout(_LOOK_SECONDS)
        self.port: int = self._listener.getsockname()[1]
        self._room = threading.BoundedSemaphore(_CONNECTIONS)
        self._open: set[socket.socket] = set()
        self._guard = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="state server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; transfers that are under way end."""
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # which ends an accept that waits
        self._thread.join(2 * _LOOK_SECONDS)
        self._listener.close()
        with self._guard:
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                # Out of descriptors, for instance; the next one may be served again.
                self._closed.wait(_LOOK_SECONDS)
                continue
            if not self._room.acquire(blocking=False):
                connection.close()
                continue
            thread = threading.Thread(
                target=self._serve, args=(connection,), name="state transfer", daemon=True
            )
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with self._guard:
            self._open.add(connection)
        try:
            with connection, suppress(OSError, ValueError):
                keep_alive(connection)
                first = True
                while not self._closed.is_set():
                    line = _read_line(connection, _REQUEST_SECONDS if first else _IDLE_SECONDS)
                    if not line or not self._answer(connection, line):
                        return
                    first = False
        finally:
            with self._guard:
                self._open.discard(connection)
            self._room.release()

    def _answer(self, connection: socket.socket, line: bytes) -> bool:
        """Answer one request; returns whether to read another."""
        request = json.loads(line)
        token = request.get("token") if isinstance(request, dict) else None
        if not isinstance(token, str) or not hmac.compare_digest(token.encode(), self._token):
            return False  # a stranger, who is told nothing
        connection.settimeout(_IDLE_SECONDS)
        if request.get("ask") == "inventory":
            text = json.dumps(self._state.inventory().to_record()).encode()
            connection.sendall(_line({"bytes": len(text)}) + text)
            return True
        ask, path = request.get("ask"), request.get("path")
        if isinstance(path, str) and _PATH.fullmatch(path):
            if ask == "file":
                return self._send_file(connection, path, request)
            if ask == "compare" and isinstance(block := request.get("block"), int):
                self._compare(path, block)
                connection.sendall(_line({"bytes": 0}))
                return True
        connection.sendall(_line({"error": "there is no such request"}))
        return False

    def _send_file(self, connection: socket.socket, path: str, request: Mapping[str, Any]) -> bool:
        try:
            with self._opened(path) as file:
                size = os.fstat(file.fileno()).st_size
                begin = min(int(request.get("begin", 0)), size)
                end = min(int(request.get("end", size)), size)
                count = max(0, end - begin)
                connection.sendall(_line({"bytes": count}))
                return count == 0 or connection.sendfile(file, begin, count) == count
        except FileNotFoundError:
            connection.sendall(_line({"error": f"it no longer has {path}"}))
            return False

    def _compare(self, path: str, block: int) -> None:
        """Mark a file of which a block is damaged here."""
        file = self._place(path)
        with suppress(OSError, ValueError, LookupError):
            identity, index = file_identity(file), (file.parent / INDEX_FILE).read_text()
            stored = files_of_index(index).files[file.name]
            if block not in range(len(stored.blocks)):
                return
            problem = block_problem(file, stored, block)
            if problem is None or not problem.is_damage:
                return
            # Ranks may have replaced the generation meanwhile.
            now = file_identity(file), (file.parent / INDEX_FILE).read_text()
            if now == (identity, index):
                mark_damaged(self._state.folder, identity)
                print_line(f"warning: {path} in memory is damaged and not used any more: {problem}")

    def _opened(self, path: str) -> BinaryIO:
        return self._place(path).open("rb")

    def _place(self, path: str) -> Path:
        """A copy that was removed after a restart may have become the node's own file."""
        file = self._state.folder / path
        return file if file.exists() else self._state.folder / path[path.index("iter_") :]


class StateClient:
    """One connection to a StateServer. Its calls raise HeteroError, which names the node."""

    def __init__(self, peer: Peer, *, seconds: float = _IDLE_SECONDS) -> None:
        """`seconds`: for every wait without a byte."""
        self._peer = peer
        try:
            self._connection = socket.create_connection(
                (peer.host, peer.port), timeout=_CONNECT_SECONDS
            )
        except OSError as error:
            raise self._failure(error) from error
        self._connection.settimeout(seconds)
        keep_alive(self._connection)

    def inventory(self) -> Inventory:
        """What the node has."""
        try:
            return Inventory.from_record(json.loads(self._whole({"ask": "inventory"})))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise HeteroError(f"{self._peer} answers with no list of state") from error

    def text(self, path: str) -> str:
        """A small file."""
        return self._whole({"ask": "file", "path": path}).decode()

    def copy_block(self, path: str, *, file: int, begin: int, size: int, buffer: memoryview) -> int:
        """Write the bytes [begin, begin + size) of a file to the same place of `file`.

        Returns their CRC-32. Raises OSError where they cannot be written.
        """
        count, checksum, end = self._ask_for(path, begin, size), 0, begin + size
        if count != size:
            raise HeteroError(
                f"{self._peer} holds damaged state: {path} ends at byte {begin + count}"
            )
        while begin < end:
            try:
                count = self._connection.recv_into(buffer[: min(end - begin, len(buffer))])
                if not count:
                    raise ConnectionError("it closed the connection")
            except OSError as error:
                raise self._failure(error) from error
            data = buffer[:count]
            checksum = zlib.crc32(data, checksum)
            while len(data):
                written = os.pwrite(file, data, begin)
                data, begin = data[written:], begin + written
        return checksum

    def compare(self, path: str, block: int) -> None:
        """Have the node compare a block that came with other bytes than were written."""
        self._whole({"ask": "compare", "path": path, "block": block})

    def cancel(self) -> None:
        """End the connection from another thread: what waits on it fails at once."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()

    def _whole(self, request: Mapping[str, Any]) -> bytes:
        try:
            left = self._ask(request)
            data = bytearray(left)
            view = memoryview(data)
            while len(view):
                count = self._connection.recv_into(view)
                if not count:
                    raise ConnectionError("it closed the connection")
                view = view[count:]
            return bytes(data)
        except OSError as error:
            raise self._failure(error) from error

    def _ask_for(self, path: str, begin: int, size: int) -> int:
        if not _PATH.fullmatch(path):
            raise HeteroError(f"{self._peer} names {path!r}, which is no file of state")
        try:
            return self._ask({"ask": "file", "path": path, "begin": begin, "end": begin + size})
        except OSError as error:
            raise self._failure(error) from error

    def _ask(self, request: Mapping[str, Any]) -> int:
        """Send a request; returns the number of bytes that follow."""
        self._connection.sendall(_line({"token": self._peer.token, **request}))
        line = _read_line(self._connection, self._connection.gettimeout() or _IDLE_SECONDS)
        if not line:
            raise ConnectionError("it closed the connection: it may be of another job")
        try:
            answer = json.loads(line)
            if "error" in answer:
                raise HeteroError(f"{self._peer}: {answer['error']}")
            size = int(answer["bytes"])
        except (ValueError, KeyError, TypeError) as error:
            raise HeteroError(f"{self._peer} answers with something else than state") from error
        return size

    def _failure(self, error: OSError) -> HeteroError:
        return HeteroError(
            f"state in memory cannot be read from {self._peer} ({error.strerror or error})"
        )

    def __enter__(self) -> StateClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Wanted:
    """A file that is to be at `target`, byte for byte as its index says."""

    target: Path
    stored: StoredFile
    node: int
    """Who has it."""
    path: str
    """In that node's state."""
    blocks: Sequence[int] | None = None
    """Those that are wanted; None: all."""

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


class Connections:
    """Connections to other nodes' servers, for threads of this node, until `close`."""

    def __init__(self, peers: Mapping[int, Peer]) -> None:
        self._peers = peers
        self._open: set[StateClient] = set()
        self._guard = threading.Lock()
        self.is_closed = False

    def open(self, node: int) -> StateClient:
        """Raises HeteroError where it cannot be reached, and after `close`."""
        if node not in self._peers:
            raise HeteroError(f"no server of node {node} is known, which holds state")
        client = StateClient(self._peers[node])
        with self._guard:
            if self.is_closed:
                client.close()
                raise HeteroError("copying was stopped")
            self._open.add(client)
        return client

    def close(self) -> None:
        """From any thread; calls that wait for bytes raise HeteroError at once."""
        with self._guard:
            self.is_closed = True
            for client in self._open:
                client.cancel()

    def forget(self, client: StateClient) -> None:
        """Close one that `open` has returned."""
        with self._guard:
            self._open.discard(client)
        client.close()

    def bring(self, wanted: Sequence[Wanted], *, deadline: float = float("inf")) -> None:
        """Write files, block by block from several threads; this is one of them.

        Raises HeteroError, with the node at fault, at the first block that cannot be had, that has
        another checksum or that is not here by `deadline`, of time.monotonic().
        """
        for begin in range(0, max(1, len(wanted)), _FILES_AT_ONCE):
            self._bring_files(wanted[begin : begin + _FILES_AT_ONCE], deadline)

    def _bring_files(self, wanted: Sequence[Wanted], deadline: float) -> None:
        files: list[int] = []
        try:
            blocks: list[tuple[Wanted, int, int]] = []
            for one in wanted:
                flags = os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC
                files.append(os.open(one.target, flags, 0o600))
                os.ftruncate(files[-1], one.stored.size)
                numbers = range(len(one.stored.blocks)) if one.blocks is None else one.blocks
                blocks += [(one, files[-1], number) for number in numbers]
            # By turns of the files: the kernel lets one thread at a time write to a file.
            left = deque(sorted(blocks, key=lambda block: block[2]))
            problems: list[HeteroError] = []
            threads = [
                threading.Thread(
                    target=self._bring_blocks,
                    args=(left, problems, deadline),
                    name="state copy",
                    daemon=True,
                )
                for _ in range(min(_STREAMS, len(blocks)) - 1)
            ]
            try:
                for thread in threads:
                    thread.start()
                self._bring_blocks(left, problems, deadline)
            except BaseException:
                self.close()  # the files may only be closed once no thread writes to them
                raise
            finally:
                for thread in threads:
                    if thread.ident is not None:
                        thread.join()
        except OSError as error:
            raise _no_room(error) from error
        finally:
            for file in files:
                os.close(file)
        if problems:
            raise problems[0]

    def _bring_blocks(
        self,
        left: deque[tuple[Wanted, int, int]],
        problems: list[HeteroError],
        deadline: float,
    ) -> None:
        buffer = memoryview(bytearray(_BUFFER_BYTES))
        clients: dict[int, StateClient] = {}
        try:
            while not problems and not self.is_closed:
                try:
                    one, file, number = left.popleft()
                except IndexError:
                    return
                if time.monotonic() > deadline:
                    raise HeteroError(f"{self._peers[one.node]} did not send {one.name} in time")
                if one.node not in clients:
                    clients[one.node] = self.open(one.node)
                begin = number * BLOCK_BYTES
                checksum = clients[one.node].copy_block(
                    one.path,
                    file=file,
                    begin=begin,
                    size=min(BLOCK_BYTES, one.stored.size - begin),
                    buffer=buffer,
                )
                if checksum != one.stored.blocks[number]:
                    with suppress(HeteroError):
                        clients[one.node].compare(one.path, number)
                    raise HeteroError(
                        f"{self._peers[one.node]} holds damaged state: {one.name} has other bytes "
                        f"than were written (block {number})"
                    )
            if self.is_closed:
                raise HeteroError("copying was stopped")
        except HeteroError as error:
            problems.append(error)
        except OSError as error:
            problems.append(_no_room(error))
        finally:
            for client in clients.values():
                self.forget(client)


def _no_room(error: OSError) -> HeteroError:
    return HeteroError(
        f"{socket.gethostname()} cannot keep state that comes from another node "
        f"({error.strerror or error})"
    )


class Replicator:
    """Keeps the newest generations of another node in this node's memory, from threads.

    What has been copied stays when the other node is lost; nothing is removed before something
    newer is here and its checksums match.
    """

    def __init__(
        self,
        state: NodeState,
        source: Peer,
        *,
        poll_seconds: float = 1.0,
        say: Callable[[str], None] = print_line,
    ) -> None:
        """`poll_seconds`: between two looks for a new generation. `say`: for warnings."""
        self._state, self._source, self._say = state, source, say
        self._folder = state.folder / copies_name(source.node)
        self._poll_seconds = poll_seconds
        self.problem: str | None = None
        """Why the last look failed; None after one that did not."""
        self._connections = Connections({source.node: source})
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replicator", daemon=True)
        self._thread.start()

    @property
    def newest(self) -> int | None:
        """The newest iteration of which there is a copy."""
        return next((one.iteration for one in self._state.copies_of(self._source.node)), None)

    @property
    def is_running(self) -> bool:
        """Whether its thread has not ended yet."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop at once, also where the other node does not answer; whole copies stay."""
        self._closed.set()
        self._connections.close()
        # It may still connect to a host that is gone; it touches no file after that.
        self._thread.join(_LOOK_SECONDS)

    def _run(self) -> None:
        client: StateClient | None = None
        while not self._closed.is_set():
            try:
                client = client or self._connections.open(self._source.node)
                self._look(client)
                self.problem = None
            except (HeteroError, OSError) as error:
                if client is not None:
                    self._connections.forget(client)
                client = None
                if not self._closed.is_set():
                    self._tell(f"{error}")
            self._closed.wait(self._poll_seconds)
        if client is not None:
            self._connections.forget(client)

    def _tell(self, problem: str) -> None:
        if self.problem is None:
            self._say(
                f"warning: this node's copy of the state of node {self._source.node} is not up to "
                f"date: {problem}"
            )
        self.problem = problem

    def _look(self, client: StateClient) -> None:
        wanted = client.inventory().own[:KEPT]
        # After a restart this node may have all of what the other one has.
        held = (*self._state.copies_of(self._source.node), *self._state.generations())
        for one in reversed(wanted):
            same = [known for known in held if known.digest == one.digest]
            if not any(one.present <= known.present for known in same):
                self._copy(client, one.iteration, one.present)
        if wanted:
            self._prune({one.iteration for one in wanted}, newest=wanted[0].iteration)

    def _copy(self, client: StateClient, iteration: int, present: frozenset[str]) -> None:
        name = folder_name(iteration)
        saving = self._folder / (name + SAVING)
        shutil.rmtree(saving, ignore_errors=True)
        saving.mkdir(parents=True)
        try:
            text = client.text(f"{name}/{INDEX_FILE}")
            index = _parsed(text, self._source)
            for folder, known in list(self._state.places(index.digest)):
                for file in present & known.present:
                    with suppress(FileExistsError, FileNotFoundError):  # or removed meanwhile
                        os.link(folder / file, saving / file)
            fetches = [
                Fetch(file, self._source.node, name)
                for file in sorted(present)
                if not (saving / file).exists()
            ]
            self._connections.bring(
                [_wanted(saving / one.file, index, one, self._source) for one in fetches]
            )
            (saving / INDEX_FILE).write_text(text)
            shutil.rmtree(self._folder / name, ignore_errors=True)
            saving.rename(self._folder / name)
        finally:
            shutil.rmtree(saving, ignore_errors=True)

    def _prune(self, there: set[int], *, newest: int) -> None:
        """Remove what is not among the newest, and what an abandoned attempt has left.

        A job that went back has given up its iterations after that.
        """
        held = [one.iteration for one in self._state.copies_of(self._source.node)]
        going = [iteration for iteration in held if iteration > newest]
        going += [i for i in held if i not in going][KEPT:]
        for iteration in going:
            if iteration not in there:
                shutil.rmtree(self._folder / folder_name(iteration), ignore_errors=True)


def fetch(
    state: NodeState,
    choice: Choice,
    *,
    node: int,
    peers: Mapping[int, Peer],
    seconds: float = 600.0,
) -> None:
    """Bring what this node lacks of a chosen generation into its own folder of it.

    What comes from another node is compared with its checksums. Files that the node has as a copy
    of another's are linked, which costs no memory; they were compared when they came. Afterwards
    ranks find the generation in `state.folder`, with the `Holders` of what is not there, and
    compare what is there before they load.

    Args:
        node: this node's number.
        peers: the servers of the nodes that `choice` names.
        seconds: for all of it.

    Raises HeteroError, with the node at fault, if a file cannot be had; older state may then be.
    """
    try:
        Holders.remove(state.folder)
        if choice.iteration is None:
            return
        _fetch(state, choice, node=node, peers=peers, seconds=seconds)
        here = next(state.places(choice.digest))[1].present
        files = {file: one for file, one in choice.holders.items() if file not in here}
        known = {one: peers[one] for one in sorted(set(files.values()))}
        Holders(choice.iteration, choice.digest, files, known).write(state.folder)
    except OSError as error:
        raise _no_room(error) from error


def _fetch(
    state: NodeState, choice: Choice, *, node: int, peers: Mapping[int, Peer], seconds: float
) -> None:
    fetches: Sequence[Fetch] = choice.fetches.get(node, ())
    if choice.iteration is None or not fetches:
        return
    deadline = time.monotonic() + seconds
    final = state.folder / folder_name(choice.iteration)
    is_new = fetches[0].file == INDEX_FILE
    # An own folder that lacks files is completed in place: its ranks have written it, and it is
    # only taken for whole once all are there.
    folder = final.with_name(final.name + SAVING) if is_new else final
    connections = Connections(peers)
    if is_new:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        text = _index_text(state, fetches[0], node=node, connections=connections)
        source = peers.get(fetches[0].node, f"node {node}")
        index = _parsed(text, source)
        if index.digest != choice.digest:
            raise HeteroError(
                f"{source} has replaced iteration {choice.iteration} since it was chosen; choose "
                "again"
            )
        (folder / INDEX_FILE).write_text(text)
    else:
        index = _index_in(folder)
    wanted = []
    for one in fetches[is_new:]:
        part = folder / (one.file + _PART)
        part.unlink(missing_ok=True)
        if one.node == node:
            os.link(state.folder / one.folder / one.file, part)
            part.rename(folder / one.file)
        else:
            wanted.append(_wanted(part, index, one, peers.get(one.node, f"node {one.node}")))
    try:
        connections.bring(wanted, deadline=deadline)
    except HeteroError:
        for each in wanted:
            each.target.unlink(missing_ok=True)
        raise
    for each in wanted:
        each.target.rename(folder / each.name)
    if is_new:
        shutil.rmtree(final, ignore_errors=True)
        folder.rename(final)


def _index_text(state: NodeState, one: Fetch, *, node: int, connections: Connections) -> str:
    if one.node == node:
        return (state.folder / one.folder / INDEX_FILE).read_text()
    client = connections.open(one.node)
    try:
        return client.text(f"{one.folder}/{INDEX_FILE}")
    finally:
        connections.forget(client)


def _index_in(folder: Path) -> NamedFiles:
    try:
        return files_of_index((folder / INDEX_FILE).read_text())
    except (OSError, ValueError) as error:
        raise HeteroError(f"{folder / INDEX_FILE} cannot be read ({error})") from error


def _parsed(text: str, source: object) -> NamedFiles:
    try:
        return files_of_index(text)
    except ValueError as error:
        raise HeteroError(f"{source}: {error}") from error


def _wanted(target: Path, index: NamedFiles, one: Fetch, source: object) -> Wanted:
    """A file of an index. Raises HeteroError where the index does not name it, or not whole."""
    stored = index.files.get(one.file)
    if stored is None:
        raise HeteroError(f"{source} has {one.file}, which its {INDEX_FILE} does not name")
    if stored.lacks_checksums:
        raise HeteroError(f"{source} holds damaged state: {one.file} has too few checksums")
    return Wanted(target, stored, one.node, f"{one.folder}/{one.file}")


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record).encode() + b"\n"


def _read_line(connection: socket.socket, seconds: float) -> bytes:
    """One line without its end; empty if the peer closed. Raises OSError after `seconds`.

    Byte by byte: what follows the line belongs to the reader of the answer.
    """
    before, deadline = connection.gettimeout(), time.monotonic() + seconds
    line = bytearray()
    try:
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("it sent no whole line in time")
            connection.settimeout(left)
            byte = connection.recv(1)
            if not byte:
                return b""
            if byte == b"\n":
                return bytes(line)
            line += byte
            if len(line) > _LARGEST_LINE:
                raise OSError("it sent too long a line")
    finally:
        connection.settimeout(before)
