"""The token files of a run, which are shown under their names only when they are whole.

They are written in a hidden folder beside the output, and renamed out of it at the end. A run that
fails or is interrupted leaves nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy

from hetero.errors import UserError
from hetero.tools.preprocessing.encoder import Tokens
from hetero.tools.preprocessing.index_file import (
    IndexContent,
    blocks_of_file,
    one_sequence_each,
    write_index,
)
from megatron.hetero.dataset_description import SUFFIX, Description
from megatron.hetero.import_core import import_megatron_core

_SUFFIXES = (SUFFIX, ".bin", ".idx")
"""Of the finished files, in the order in which they are renamed."""


@dataclass
class Output:
    """The files of one key: PREFIX_KEY_document.bin, .idx and .json."""

    name: str
    data: IO[bytes]
    lengths: IO[bytes]
    documents: int = 0
    tokens: int = 0


class OutputFiles:
    """The output of a run, one .bin and .idx for each key. A context manager.

    It locks its folder, so that two runs of one prefix do not write each other's files.
    """

    def __init__(self, prefix: str, keys: Sequence[str], *, overwrite: bool) -> None:
        """Raises UserError if a finished file exists and may not be replaced."""
        head, name = os.path.split(prefix)
        self._folder = Path(head, f".{name}.partial")
        self.names = [f"{prefix}_{key}_document" for key in keys]
        self.outputs: list[Output] = []
        self.read = self.replaced = 0
        """Documents read, empty ones too, and those with U+FFFD for an unpaired surrogate."""
        self._lock: IO[bytes] | None = None
        for path in (Path(name + suffix) for name in self.names for suffix in _SUFFIXES):
            if path.is_dir() or (path.exists() and not overwrite):
                raise UserError(f"{path} exists; choose another --output-prefix or --overwrite it")

    def __enter__(self) -> OutputFiles:
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        self._take()
        for name in self.names:
            data = open(self._inside(name, ".bin"), "wb", buffering=1 << 20)
            lengths = open(self._inside(name, ".lengths"), "wb", buffering=1 << 20)
            self.outputs.append(Output(name, data, lengths))
        return self

    def add(self, encoded: Sequence[Tokens], *, read: int) -> None:
        """Append the tokens of each key, of `read` documents."""
        for output, tokens in zip(self.outputs, encoded, strict=True):
            output.data.write(tokens.ids.tobytes())
            output.lengths.write(tokens.lengths.tobytes())
            output.documents += len(tokens.lengths)
            output.tokens += len(tokens.ids)
        self.read += read
        self.replaced += max(tokens.replaced for tokens in encoded)

    def finish(self, description: Description, dtype: type[numpy.number[Any]]) -> None:
        """Write descriptions and indexes, bring all to disk, and rename it to its names."""
        import_megatron_core()
        from megatron.core.datasets.indexed_dataset import DType

        for output in self.outputs:
            with self._inside(output.name, SUFFIX).open("w") as stream:
                stream.write(description.to_json())
                _sync(stream)
            for file in (output.data, output.lengths):
                _sync(file)
            lengths = self._inside(output.name, ".lengths")
            content = IndexContent(
                dtype_code=DType.code_from_dtype(dtype),
                dtype_size=numpy.dtype(dtype).itemsize,
                sequences=output.documents,
                documents=output.documents,
                lengths=partial(blocks_of_file, lengths, numpy.int32, count=output.documents),
                boundaries=one_sequence_each(output.documents),
            )
            write_index(str(self._inside(output.name, ".idx")), content)
        with _without_interrupts():
            for output in self.outputs:
                # A reader needs both files, so an older .idx goes first and the new one comes last.
                with suppress(FileNotFoundError):
                    os.remove(output.name + ".idx")
                for suffix in _SUFFIXES:
                    os.replace(self._inside(output.name, suffix), output.name + suffix)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for output in self.outputs:
            for file in (output.data, output.lengths):
                # A full disk fails here a second time, and must not hide the error of the first.
                with suppress(OSError):
                    file.close()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            # A failed write does not say of which file, and only these files are written.
            error.filename = error.filename or str(self._folder)
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()

    def _inside(self, name: str, suffix: str) -> Path:
        return self._folder / f"{self.names.index(name)}{suffix}"

    def _take(self) -> None:
        """Lock the folder. It may be one that a killed run has left."""
        while True:
            self._folder.mkdir(exist_ok=True)
            try:
                lock = open(self._folder / "lock", "ab")  # noqa: SIM115
            except FileNotFoundError:  # another run has just finished and removed the folder
                continue
            self._lock_file(lock)
            if os.fstat(lock.fileno()).st_nlink:
                self._lock = lock
                return
            lock.close()

    def _lock_file(self, lock: IO[bytes]) -> None:
        try:
            # A record lock is the process's own: workers do not inherit it.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return  # a file system without locks
            lock.close()
            raise UserError(
                f"another process writes to {self._folder}; wait for it, or choose another "
                "--output-prefix"
            ) from error


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C: some of the files under their names would be neither all nor nothing."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())
