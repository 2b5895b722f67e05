"""The files of a run while it is under way: what a later run continues, and how they are shown.

Everything lies in a hidden folder beside the output. From time to time its files are brought to
disk, and then a state that says how far they count. A later run of the same command cuts them to
what the state says and goes on from there. The finished files are renamed out of the folder, which
can be repeated, so that a reader sees an index whole or not at all, whenever the run is killed.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy

from hetero.errors import UserError
from hetero.text import counted
from hetero.tools.preprocessing.batches import Frontier
from hetero.tools.preprocessing.encoder import Tokens
from hetero.tools.preprocessing.index_file import (
    IndexContent,
    blocks_of_file,
    one_sequence_each,
    write_index,
)
from hetero.tools.text_input import Place
from hetero.tools.tool_command_line import Interrupted
from megatron.hetero.dataset_description import SUFFIX, Description, TokenizerInfo
from megatron.hetero.import_core import import_megatron_core

_STATE_VERSION = 2
_SUFFIXES = (SUFFIX, ".bin", ".idx")
"""Of the finished files, in the order in which they are shown."""


@dataclass(frozen=True)
class Saved:
    """How far a run has come, as its state file says."""

    frontier: Frontier
    read: int
    """Documents read, empty ones too."""
    documents: tuple[int, ...]
    """Documents written, by key."""
    tokens: tuple[int, ...]
    replaced: int = 0
    """Documents with U+FFFD in place of an unpaired surrogate."""
    complete: bool = False

    def to_mapping(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_mapping(cls, record: dict[str, Any]) -> Saved:
        frontier = record["frontier"]
        return cls(
            frontier=Frontier(frontier["file"], Place(**frontier["place"]), frontier["disk_bytes"]),
            read=record["read"],
            documents=tuple(record["documents"]),
            tokens=tuple(record["tokens"]),
            replaced=record.get("replaced", 0),
            complete=record["complete"],
        )


class WorkFolder:
    """The output of a run under way, one .bin and .idx for each key. A context manager.

    Left by an error of the input it removes what was done, for another input cannot continue it;
    left by any other error it keeps what was saved and says so.
    """

    def __init__(self, prefix: str, keys: Sequence[str], run: dict[str, Any]) -> None:
        """`run` describes all that the output depends on, in terms that JSON gives back alike."""
        head, name = os.path.split(prefix)
        self.path = Path(head, f".{name}.partial")
        self.outputs = [f"{prefix}_{key}_document" for key in keys]
        self._run = run
        self._files: list[tuple[IO[bytes], IO[bytes]]] = []
        self._lock: IO[bytes] | None = None
        self._dtype: type[numpy.number[Any]] = numpy.int32
        nothing = (0,) * len(keys)
        self.state = Saved(Frontier(), 0, nothing, nothing)
        self._saved = self._writing = False

    def refuse_existing(self, overwrite: bool) -> None:
        """Refuse to replace finished files that are not this very run's own."""
        record = self._read_state()
        ours = record is not None and record["run"] == self._run and record["saved"]["complete"]
        for number, output in enumerate(self.outputs):
            for suffix in _SUFFIXES:
                path = Path(output + suffix)
                renamed = ours and not self._inside(number, suffix).exists()
                if path.is_dir() or (path.exists() and not overwrite and not renamed):
                    raise UserError(
                        f"{path} exists; choose another --output-prefix or --overwrite it"
                    )

    def open(self, dtype: type[numpy.number[Any]], *, restart: bool) -> None:
        """Take the folder for this run alone, with what an earlier run of the same left in it."""
        self._dtype = dtype
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._take()
        record = self._read_state()
        if record is not None and not restart:
            self._require_same(record["run"])
            self.state = Saved.from_mapping(record["saved"])
            self._saved = True
            print(
                f"continuing the interrupted run in {self.path} after "
                f"{counted(self.state.read, 'document')}",
                file=sys.stderr,
            )
        else:
            # Before the files that it speaks of.
            (self.path / "state.json").unlink(missing_ok=True)
        if not self.state.complete:
            self._files = [self._open_output(number) for number in range(len(self.outputs))]
        self._writing = True

    def add(self, encoded: Sequence[Tokens], *, read: int, frontier: Frontier) -> None:
        """Append the tokens of each key; `frontier` is where the input goes on behind them."""
        for (data, lengths), tokens in zip(self._files, encoded, strict=True):
            data.write(tokens.ids.tobytes())
            lengths.write(tokens.lengths.tobytes())
        state = self.state
        counts = zip(state.documents, encoded, strict=True)
        sizes = zip(state.tokens, encoded, strict=True)
        self.state = replace(
            state,
            frontier=frontier,
            read=state.read + read,
            documents=tuple(count + len(tokens.lengths) for count, tokens in counts),
            tokens=tuple(size + len(tokens.ids) for size, tokens in sizes),
            replaced=state.replaced + max(tokens.replaced for tokens in encoded),
        )

    def save(self) -> None:
        """From here a later run can go on, whatever becomes of this one."""
        for file in (file for pair in self._files for file in pair):
            file.flush()
            os.fsync(file.fileno())
        self._write_state()

    def finish(self, tokenizer: TokenizerInfo) -> None:
        """Write descriptions and indexes, and show all files under their names."""
        if not self.state.complete:
            self._write_descriptions(tokenizer)
            self._write_indexes()
        for number, output in enumerate(self.outputs):
            self._show(number, output)
        self._saved = False

    def _write_descriptions(self, tokenizer: TokenizerInfo) -> None:
        append_eod = bool(self._run["flags"]["append_eod"])
        text = Description(tokenizer, append_eod, self._run).to_json()
        for number in range(len(self.outputs)):
            with self._inside(number, SUFFIX).open("w") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())

    def _write_indexes(self) -> None:
        import_megatron_core()
        from megatron.core.datasets.indexed_dataset import DType

        self.save()
        for number, documents in enumerate(self.state.documents):
            lengths = self._inside(number, ".lengths")
            content = IndexContent(
                dtype_code=DType.code_from_dtype(self._dtype),
                dtype_size=numpy.dtype(self._dtype).itemsize,
                sequences=documents,
                documents=documents,
                lengths=partial(blocks_of_file, lengths, numpy.int32, count=documents),
                boundaries=one_sequence_each(documents),
            )
            write_index(str(self._inside(number, ".idx")), content)
        self.state = replace(self.state, complete=True)
        self._write_state()

    def _show(self, number: int, output: str) -> None:
        """A reader needs both files, so the .idx goes first and comes last."""
        if not self._inside(number, ".idx").exists():
            return
        if self._inside(number, ".bin").exists():
            with suppress(FileNotFoundError):
                os.remove(output + ".idx")
        for suffix in _SUFFIXES:
            if self._inside(number, suffix).exists():
                os.replace(self._inside(number, suffix), output + suffix)

    def _open_output(self, number: int) -> tuple[IO[bytes], IO[bytes]]:
        """Both files at the place up to which the state vouches for them."""
        sizes = (
            self.state.tokens[number] * numpy.dtype(self._dtype).itemsize,
            self.state.documents[number] * numpy.dtype(numpy.int32).itemsize,
        )
        return tuple(  # type: ignore[return-value]
            _open_cut(self._inside(number, suffix), size)
            for suffix, size in zip((".bin", ".lengths"), sizes, strict=True)
        )

    def _inside(self, number: int, suffix: str) -> Path:
        return self.path / f"{number}{suffix}"

    def _take(self) -> None:
        """Lock the folder: two runs in it would write each other's files."""
        while True:
            self.path.mkdir(exist_ok=True)
            try:
                self._lock = open(self.path / "lock", "ab")  # noqa: SIM115
            except FileNotFoundError:  # another run has just finished and removed the folder
                continue
            self._lock_file(self._lock)
            if os.fstat(self._lock.fileno()).st_nlink:
                return
            self._lock.close()

    def _lock_file(self, lock: IO[bytes]) -> None:
        try:
            # A record lock is the process's own: workers do not inherit it.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return  # a file system without locks
            lock.close()
            raise UserError(
                f"another process writes to {self.path}; wait for it, or choose another "
                "--output-prefix"
            ) from error

    def _require_same(self, run: dict[str, Any]) -> None:
        different = [name for name in self._run if run.get(name) != self._run[name]]
        if different:
            raise UserError(
                f"{self.path} holds an interrupted run with other {' and '.join(different)}; "
                "repeat that run's command to continue it, or give --restart to discard it"
            )

    def _read_state(self) -> dict[str, Any] | None:
        try:
            record = json.loads((self.path / "state.json").read_bytes())
        except (OSError, ValueError):
            return None
        return record if record.get("version") == _STATE_VERSION else None

    def _write_state(self) -> None:
        record = {"version": _STATE_VERSION, "run": self._run, "saved": self.state.to_mapping()}
        temporary = self.path / "state.json.tmp"
        with open(temporary, "w") as stream:
            json.dump(record, stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, self.path / "state.json")
        self._saved = True

    def __enter__(self) -> WorkFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in (file for pair in self._files for file in pair):
            # A full disk fails here a second time, and nothing may hide the error that came first.
            with suppress(OSError):
                file.close()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            # A failed write does not say of which file, and only these files are written.
            error.filename = error.filename or str(self.path)
        keep = self._saved and not isinstance(error, UserError)
        if self._writing and not keep:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()
        if self._writing and keep and error is not None:
            kept = f"what was done up to the last save is kept in {self.path}"
            if isinstance(error, KeyboardInterrupt):
                raise Interrupted(f"interrupted; {kept}, and the same command goes on from there")
            print(f"{kept}; the same command goes on from there", file=sys.stderr)


def _open_cut(path: Path, size: int) -> IO[bytes]:
    if path.exists() and path.stat().st_size < size:
        raise UserError(f"{path} is cut short; give --restart to discard the interrupted run")
    stream = open(path, "r+b" if path.exists() else "w+b", buffering=1 << 20)  # noqa: SIM115
    stream.truncate(size)
    stream.seek(size)
    return stream
