"""Documents from plain text and JSON Lines files, plain, gzipped or zstd, one at a time.

A document stays undecoded until someone asks for its text, so that the process which reads files
only cuts them, and the ones that tokenize do the rest. Each knows its file and line for errors.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import importlib.util
import io
import json
import os
import re
import shlex
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from hetero.errors import Faults, UserError

if TYPE_CHECKING:
    import zstandard

FORMATS = ("auto", "text", "jsonl")
TEXT_DOCUMENTS = ("blank-line", "line", "file")

_SURROGATE = re.compile("[\ud800-\udfff]")
_JSON_NAMES = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    list: "an array",
    dict: "an object",
}
_UTF8_MARK = b"\xef\xbb\xbf"
_BUFFER_BYTES = 1 << 20
_ZSTD_PIECE_BYTES = 1 << 11
"""Compressed bytes decoded at once: at zstd's highest ratio they become 64 MiB, and no more."""
_ZSTD_LARGEST_WINDOW = 1 << 31
"""What `zstd --ultra --long=31` writes; the library's own limit refuses such a file."""
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_PACKED = {
    b"\x1f\x8b": "a gzip file; let its name end in .gz",
    b"\x28\xb5\x2f\xfd": "a zstd file; let its name end in .zst",
    b"BZh91AY&SY": "a bzip2 file; unpack it with bunzip2",
    b"\xfd7zXZ": "an xz file; unpack it with unxz",
    b"PK\x03\x04": "a zip file; unpack it with unzip",
    b"PAR1\x15": "a Parquet file; convert it to JSON Lines",
}
"""What a file that is no text begins with, and what to do about it."""
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
                f"{iconv_hint(self.path, self.data)}"
            ) from error

    def values(self, keys: Sequence[str]) -> dict[str, str]:
        """The strings under `keys` of a document that is a JSON object."""
        record = self._json()
        return {key: self._string(record, key) for key in keys}

    def _json(self) -> dict[str, object]:
        try:
            # Files that were joined have a byte order mark inside, where each of them begins.
            record = json.loads(self.text().removeprefix("\ufeff"))
        except json.JSONDecodeError as error:
            raise self.error(
                f"broken JSON ({error.msg} at column {error.colno}); put one object on each line"
            ) from error
        except ValueError as error:  # a number of thousands of digits
            raise self.error(f"JSON that cannot be read ({error}); shorten it") from error
        except RecursionError as error:
            raise self.error("JSON nested too deeply; put one flat object on each line") from error
        if not isinstance(record, dict):
            raise self.error("is not a JSON object; put one object on each line")
        return record

    def _string(self, record: dict[str, object], key: str) -> str:
        if key not in record:
            there = ", ".join(sorted(record)) or "none"
            raise self.error(
                f"has no key {key!r} (its keys: {there}); name one of them (--json-keys, or "
                "--json-key of train_tokenizer.py)"
            )
        value = record[key]
        if not isinstance(value, str):
            raise self.error(
                f"holds {_JSON_NAMES[type(value)]} under {key!r} where a string belongs; correct "
                "or remove the line"
            )
        return value

    def error(self, problem: str) -> UserError:
        problem = problem.encode("utf-8", "backslashreplace").decode("utf-8")
        return UserError(f"{self.path}:{self.line}: {problem}")


def replace_unpaired_surrogates(text: str) -> str:
    """The text, with U+FFFD for each half of a surrogate pair without the other half.

    JSON can hold one, as where an emoji was cut: "\\ud83d". It is no character, so that no
    tokenizer's library takes it, except tiktoken, which replaces it in this way.
    """
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def iconv_hint(path: str, beginning: bytes) -> str:
    """How a file in another encoding is made one in UTF-8: a command that can be pasted.

    UTF-16 shows at its `beginning`. Encodings of one byte a letter do not show, so the most common
    one is named, and as a guess. Without -f, iconv would take the terminal's, which is UTF-8.
    """
    root, suffix = os.path.splitext(path)
    unpacked = {"gzip": "gzip -dc", "zstd": "zstd -dc"}.get(_COMPRESSIONS.get(suffix, ""), "")
    stem, extension = os.path.splitext(root if unpacked else path)
    source, target = shlex.quote(path), shlex.quote(f"{stem}.utf8{extension}")
    if beginning.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding, guess = "UTF-16", ""
    else:
        encoding, guess = "WINDOWS-1252", " if it is in Western Europe's encoding"
    convert = f"iconv -f {encoding} -t UTF-8"
    command = f"{unpacked} {source} | {convert}" if unpacked else f"{convert} {source}"
    return f"convert it{guess}: `{command} > {target}`"


class InputFile:
    """One input, read from front to back."""

    def __init__(self, path: str, format: str) -> None:
        self.path = path
        self.size = os.path.getsize(path)
        self._raw: io.FileIO | None = None
        self._stream: io.BufferedReader | None = None
        self._offset = self._line = 0
        stem, extension = os.path.splitext(path)
        self._compression = _COMPRESSIONS.get(extension.lower())
        if self._compression == "zstd":
            _require_zstandard(path)
        if self._compression is None:
            _refuse_packed(path)
        self._stem = path if self._compression is None else stem
        self.format = self._guess_format() if format == "auto" else format

    @property
    def position(self) -> int:
        """How far the documents have come, in bytes of the file on disk, for a progress bar.

        Of a packed file an estimate: what the buffers are ahead is taken to be packed as the rest.
        """
        if self._raw is None or self._stream is None or self._raw.closed:
            return self.size
        if self._compression is None:
            return self._offset
        return self._raw.tell() * self._offset // max(self._stream.raw.tell(), 1)

    def documents(self, text_documents: str) -> Iterator[Document]:
        """Every document in order; `text_documents` says how plain text is cut."""
        lines = self._lines()
        if self.format == "jsonl" or text_documents == "line":
            return self._by_line(lines)
        if text_documents == "file":
            return self._whole(lines)
        return self._by_blank_line(lines)

    def _by_line(self, lines: Iterator[bytes]) -> Iterator[Document]:
        for line in lines:
            if line.strip():
                yield Document(self.path, self._line, line.rstrip(b"\r\n"))

    def _whole(self, lines: Iterator[bytes]) -> Iterator[Document]:
        data = b"".join(lines)
        if data:
            yield Document(self.path, 1, data)

    def _by_blank_line(self, lines: Iterator[bytes]) -> Iterator[Document]:
        paragraph: list[bytes] = []
        for line in lines:
            if line.strip():
                paragraph.append(line)
            elif paragraph:
                yield self._paragraph(paragraph, self._line)
                paragraph = []
        if paragraph:
            yield self._paragraph(paragraph, self._line + 1)

    def _paragraph(self, lines: list[bytes], next_line: int) -> Document:
        return Document(self.path, next_line - len(lines), b"".join(lines).rstrip(b"\r\n"))

    def _lines(self) -> Iterator[bytes]:
        try:
            # Every layer is closed on the way out, also when reading ends early.
            with open(self.path, "rb", buffering=0) as self._raw, self._decompressed() as stream:
                self._stream = stream
                self._offset = self._line = 0
                for line in stream:
                    self._offset += len(line)
                    self._line += 1
                    yield line.removeprefix(_UTF8_MARK) if self._line == 1 else line
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UserError(
                f"{self.path} is a damaged {self._compression} file ({error}); copy it again"
            ) from error

    def _decompressed(self) -> io.BufferedReader:
        assert self._raw is not None
        if self._compression == "gzip":
            unpacked = gzip.GzipFile(fileobj=self._raw, mode="rb")
            return io.BufferedReader(unpacked, _BUFFER_BYTES)
        if self._compression == "zstd":
            return io.BufferedReader(_ZstdText(self._raw), _BUFFER_BYTES)
        return io.BufferedReader(self._raw, _BUFFER_BYTES)

    def _guess_format(self) -> str:
        extension = os.path.splitext(self._stem)[1].lower()
        return _FORMAT_OF_EXTENSION.get(extension) or self._guess_from_content()

    def _guess_from_content(self) -> str:
        lines = self._lines()
        first = next((line for line in lines if line.strip()), b"")
        lines.close()  # type: ignore[attr-defined]
        try:
            return "jsonl" if isinstance(json.loads(first), dict) else "text"
        except ValueError:
            return "text"


def _refuse_packed(path: str) -> None:
    """Refuse a file that would else be taken for text in another encoding."""
    with open(path, "rb") as file:
        beginning = file.read(max(map(len, _PACKED)))
    for magic, words in _PACKED.items():
        if beginning.startswith(magic):
            raise UserError(f"--input {path} is {words}")


def _require_zstandard(path: str) -> None:
    """Refuse a zstd file at once where the package that reads it, which few need, is missing."""
    if importlib.util.find_spec("zstandard") is None:
        raise UserError(
            f"{path} is a zstd file and the package zstandard is not installed; "
            "run: pip install zstandard"
        )


class _ZstdText(io.RawIOBase):
    """What a zstd file holds, frame after frame; a damaged one raises EOFError.

    zstandard's own reader ends in silence where a file was cut short, and so loses text; a frame
    that is decoded by itself tells whether it is whole.
    """

    def __init__(self, raw: io.FileIO) -> None:
        import zstandard

        self._compressed = io.BufferedReader(raw, _BUFFER_BYTES)
        self._damage = zstandard.ZstdError
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_LARGEST_WINDOW)
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._ahead = b""
        self._text = memoryview(b"")
        self._read = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._read

    def readinto(self, buffer: Any) -> int:
        while not self._text:
            if not self._decode():
                return 0
        count = min(len(buffer), len(self._text))
        buffer[:count] = self._text[:count]
        self._text = self._text[count:]
        self._read += count
        return count

    def _decode(self) -> bool:
        """Decode the next piece, which may give no text; False at the end of the file."""
        piece = self._ahead or self._compressed.read(_ZSTD_PIECE_BYTES)
        if not piece:
            if self._frame is not None:
                raise EOFError("it ends in the middle of a frame")
            return False
        if self._frame is None:
            self._frame = self._decompressor.decompressobj()
        try:
            self._text = memoryview(self._frame.decompress(piece))
        except self._damage as error:
            raise EOFError(str(error)) from error
        self._ahead = b""
        if self._frame.eof:
            self._ahead = self._frame.unused_data
            self._frame = None
        return True


def open_inputs(patterns: Sequence[str], format: str) -> list[InputFile]:
    """The files that `--input` names, in the order given and within a glob by name.

    Raises UserError with every path that cannot be read.
    """
    faults = Faults()
    paths = [path for pattern in patterns for path in faults.read(partial(_matches, pattern)) or ()]
    files = [faults.read(partial(_open_input, path, format)) for path in paths]
    faults.refuse()
    return [file for file in files if file is not None]


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


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Let an error name the file that is written: that of a full disk names none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or path
        raise


def temporary_name(path: str) -> str:
    """Where a file is written until it is complete: beside `path`, so that a rename is atomic."""
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}.{os.getpid()}.tmp")
