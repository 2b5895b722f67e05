"""Files of state that other nodes have: a rank reads the blocks that it needs from there."""

from __future__ import annotations

import shutil
from pathlib import Path

from hetero.recover.replication import Connections, Holders, Wanted
from hetero.recover.stored_files import BLOCK_BYTES, StoredFile, folder_name


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

    def bring(self, file: str, stored: StoredFile, begin: int, end: int) -> Path:
        """Have the bytes [begin, end) of a file here, in a file of its full size.

        Each block of them is compared with its checksum. Raises HeteroError, with the node at
        fault.
        """
        here = self._here.setdefault(file, set())
        blocks = range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES))
        path = self._folder / file
        if missing := [number for number in blocks if number not in here]:
            source = f"{folder_name(self._holders.iteration)}/{file}"
            node = self._holders.files[file]
            self._connections.bring([Wanted(path, stored, node, source, missing)])
            here.update(missing)
        return path

    def close(self) -> None:
        """Remove the parts."""
        shutil.rmtree(self._folder, ignore_errors=True)
