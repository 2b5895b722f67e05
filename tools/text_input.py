"""Documents from plain text and JSON Lines files, plain or gzipped, one at a time.

A document stays undecoded until someone asks for its text, so that the process which reads files
only cuts them, and the ones that tokenize do the rest. Each knows its file and line for errors.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetero.errors import UserError

FORMATS = ("auto", "text", "jsonl")
TEXT_DOCUMENTS = ("blank-line", "line", "file")

_UTF8_MARK = b"\xef\xbb\xbf"
_FORMAT_OF_EXTENSION = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}


@dataclass(frozen=True)
class Document:
    """One document as it stands in its file, beginning on `line`."""

    path: str
    line: int
    data: bytes

    def text(self) -> str:
        try:
            return self.data.decode("utf-8")
        except UnicodeDecodeError as error:
            line = self.line + self.data.count(b"\n", 0, error.start)
            raise UserError(
                f"{self.path}:{line}: byte 0x{self.data[error.start]:02x} is not UTF-8; "
                "convert the file, for example with `iconv -t utf-8`"
            ) from error

    def values(self, keys: Sequence[str]) -> dict[str, str]:
        """The strings under `keys` of a document that is a JSON object."""
        record = self._json()
        return {key: self._string(record, key) for key in keys}

    def _json(self) -> dict[str, object]:
        try:
            record = json.loads(self.text())
        except json.JSONDecodeError as error:
            raise self.error(
                f"broken JSON ({error.msg} at column {error.colno}); put one object on each line"
            ) from error
        except RecursionError as error:
            raise self.error("JSON nested too deeply; put one flat object on each line") from error
        if not isinstance(record, dict):
            raise self.error("is not a JSON object; put one object on each line")
        return record

    def _string(self, record: dict[str, object], key: str) -> str:
        if key not in record:
            there = ", ".join(sorted(record)) or "none"
            raise self.error(f"has no key {key!r} (its keys: {there}); name one of them")
        value = record[key]
        if not isinstance(value, str):
            raise self.error(f"holds {type(value).__name__} under {key!r} where a string belongs")
        return value

    def error(self, problem: str) -> UserError:
        return UserError(f"{self.path}:{self.line}: {problem}")


class InputFile:
    """One input, read once from front to back."""

    def __init__(self, path: str, format: str) -> None:
        self.path = path
        self.size = os.path.getsize(path)
        self._raw: io.FileIO | None = None
        self.format = self._guess_format() if format == "auto" else format

    @property
    def position(self) -> int:
        """Bytes read so far of the file as it is on disk, for a progress bar."""
        return self._raw.tell() if self._raw is not None and not self._raw.closed else self.size

    def documents(self, text_documents: str) -> Iterator[Document]:
        """Every document in order; `text_documents` says how plain text is cut."""
        if self.format == "jsonl" or text_documents == "line":
            return self._by_line()
        if text_documents == "file":
            return self._whole()
        return self._by_blank_line()

    def _by_line(self) -> Iterator[Document]:
        for number, line in self._lines():
            if line.strip():
                yield Document(self.path, number, line.rstrip(b"\r\n"))

    def _whole(self) -> Iterator[Document]:
        data = b"".join(line for _, line in self._lines())
        if data:
            yield Document(self.path, 1, data)

    def _by_blank_line(self) -> Iterator[Document]:
        paragraph: list[bytes] = []
        number = 0
        for number, line in self._lines():
            if line.strip():
                paragraph.append(line)
            elif paragraph:
                yield self._paragraph(paragraph, number)
                paragraph = []
        if paragraph:
            yield self._paragraph(paragraph, number + 1)

    def _paragraph(self, lines: list[bytes], next_line: int) -> Document:
        return Document(self.path, next_line - len(lines), b"".join(lines).rstrip(b"\r\n"))

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        try:
            # Every layer is closed on the way out, also when reading ends early.
            with open(self.path, "rb", buffering=0) as self._raw, self._decompressed() as stream:
                for number, line in enumerate(stream, start=1):
                    yield number, line.removeprefix(_UTF8_MARK) if number == 1 else line
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UserError(
                f"{self.path} is a damaged gzip file ({error}); copy it again"
            ) from error

    def _decompressed(self) -> io.BufferedReader | gzip.GzipFile:
        assert self._raw is not None
        if self.path.endswith(".gz"):
            return gzip.GzipFile(fileobj=self._raw, mode="rb")
        return io.BufferedReader(self._raw, buffer_size=1 << 20)

    def _guess_format(self) -> str:
        extension = os.path.splitext(self.path.removesuffix(".gz"))[1].lower()
        return _FORMAT_OF_EXTENSION.get(extension) or self._guess_from_content()

    def _guess_from_content(self) -> str:
        lines = self._lines()
        first = next((line for _, line in lines if line.strip()), b"")
        lines.close()  # type: ignore[attr-defined]
        try:
            return "jsonl" if isinstance(json.loads(first), dict) else "text"
        except ValueError:
            return "text"


def open_inputs(patterns: Sequence[str], format: str) -> list[InputFile]:
    """The files that `--input` names, in the order given and within a glob by name."""
    return [_open_input(path, format) for pattern in patterns for path in _matches(pattern)]


def _open_input(path: str, format: str) -> InputFile:
    if not os.path.isfile(path):
        kind = "a directory" if os.path.isdir(path) else "not a regular file"
        raise UserError(f"--input {path} is {kind}; name the files in it, for example with a glob")
    if not os.access(path, os.R_OK):
        raise UserError(f"--input {path} cannot be read (permission denied)")
    return InputFile(path, format)


def _matches(pattern: str) -> list[str]:
    if os.path.exists(pattern):
        return [pattern]
    paths = sorted(glob.glob(pattern, recursive=True))
    if not paths:
        matches = "matches no file" if glob.has_magic(pattern) else "does not exist"
        raise UserError(f"--input {pattern} {matches}; check the path")
    return paths


def temporary_name(path: str) -> str:
    """Where a file is written until it is complete: beside `path`, so that a rename is atomic."""
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}.{os.getpid()}.tmp")
