"""The text that the demo learns from: one that every Python brings along, or the user's own."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from pathlib import Path

from bench.real_text.text_sources import language_reference
from hetero.errors import UserError
from hetero.tools.text_input import iconv_hint

LARGEST_BYTES = 16 * 2**20
"""Of a larger file only the beginning is used: the demo trains on well under a megabyte."""
_PROMPT_WORDS, _PROMPT_LETTERS = 4, 40


@dataclass(frozen=True)
class SourceText:
    """Text in memory, and what to call it in a report."""

    name: str
    text: str
    prompt: str
    """What the trained model is asked to go on from."""
    is_cut: bool = False


def builtin_text() -> SourceText:
    """Python's own language reference, as `help()` shows it: real English, always there."""
    return SourceText(name="pydoc_data.topics", text=language_reference(), prompt="The value of")


def read_text(path: str) -> SourceText:
    """Read a file of the user's, and refuse in one sentence what is no text."""
    data = _read_bytes(path)
    is_cut = len(data) > LARGEST_BYTES
    text = _decoded(path, data[:LARGEST_BYTES], is_cut=is_cut)
    if "\0" in text:
        raise UserError(f"--text {path} is a binary file; give a text file in UTF-8")
    if not text.strip():
        raise UserError(f"--text {path} is empty; give a file with some pages of text")
    return SourceText(name=path, text=text, prompt=_first_words(text), is_cut=is_cut)


def _first_words(text: str) -> str:
    """A few words, or of a script without spaces a few letters, that the text begins with."""
    return " ".join(text.lstrip()[:1000].split()[:_PROMPT_WORDS])[:_PROMPT_LETTERS]


def _read_bytes(path: str) -> bytes:
    file = Path(path)
    if file.is_dir():
        raise UserError(f"--text {path} is a directory; give a text file inside it")
    if file.exists() and not file.is_file():
        raise UserError(f"--text {path} is not a regular file; give a text file")
    try:
        with file.open("rb") as stream:
            return stream.read(LARGEST_BYTES + 1)
    except OSError as error:
        raise UserError(
            f"--text {path} cannot be read ({error.strerror}); check the path"
        ) from error


def _decoded(path: str, data: bytes, *, is_cut: bool) -> str:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    try:
        # A file that was cut may end inside a letter, which the decoder then keeps to itself.
        text = decoder.decode(data, final=not is_cut)
    except UnicodeDecodeError as error:
        raise UserError(
            f"--text {path} is not text in UTF-8 (its byte {error.start} cannot be read); "
            f"{iconv_hint(path, data)}"
        ) from error
    return text
