"""Files of state that other nodes have: a rank reads the blocks that it needs from there."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hetero.recover.replication import Connections, Holders, Wanted
from hetero.recover.stored_files import BLOCK_BYTES, StoredFile, folder_name


@dataclass(frozen=True)
class Part:
    """The bytes [begin, end) of a file."""

    file: str
    stored: StoredFile
    begin: int
    end: int


class RemoteFiles:
    """Parts of files that other nodes have, copied as they are asked for, and removed by `close`.

    For one thread.
    """

    def __init__(self, holders: Holders, folder: Path) -> None:
        """`folder` is made, for the parts."""
        self._holders, self._folder = holders, folder
        self._connections = Connections(holders.peers)
        self._here: dict[str, set[int]] = {}
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()

    def __contains__(self, file: str) -> bool:
        return file in self._holders.files

    def path(self, file: str) -> Path:
        """Of a file of its full size, in which the parts are that were brought."""
        return self._folder / file

    def bring(self, parts: Iterable[Part]) -> None:
        """Have parts of files here, several blocks at once.

        Each block of them is compared with its checksum. Raises HeteroError, with the node at
        fault.
        """
        missing: dict[str, set[int]] = {}
        stored = {}
        for one in parts:
            touched = range(one.begin // BLOCK_BYTES, -(-one.end // BLOCK_BYTES))
            missing.setdefault(one.file, set()).update(touched)
            stored[one.file] = one.stored
        wanted = [
            Wanted(
                self.path(file),
                stored[file],
                self._holders.files[file],
                f"{folder_name(self._holders.iteration)}/{file}",
                sorted(blocks - self._here.get(file, set())),
            )
            for file, blocks in missing.items()
        ]
        self._connections.bring([one for one in wanted if one.blocks])
        for file, blocks in missing.items():
            self._here.setdefault(file, set()).update(blocks)

    def close(self) -> None:
        """Remove the parts."""
        shutil.rmtree(self._folder, ignore_errors=True)
