"""Documents in batches: what travels to a worker process at once, and where a later run goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetero.tools.text_input import START, Document, InputFile, Place

BATCH_BYTES = 1 << 18
BATCH_DOCUMENTS = 1000


@dataclass(frozen=True)
class Frontier:
    """A place in the whole input: everything before it has been read."""

    file: int = 0
    place: Place = START
    disk_bytes: int = 0
    """Bytes read from disk up to here, compressed as they are; for a progress bar."""


@dataclass(frozen=True)
class Batch:
    """Documents that travel to a worker together."""

    documents: tuple[Document, ...]
    text_bytes: int
    end: Frontier
    """Just behind the last of them."""
    text_key: str | None = None


def cut_batches(
    files: Sequence[InputFile], text_documents: str, start: Frontier | None = None
) -> Iterator[Batch]:
    """Group the documents of each file; where a batch ends does not show in the output."""
    start = start or Frontier()
    before = 0
    for number, file in enumerate(files):
        if number < start.file:
            before += file.size
            continue
        text_key = "text" if file.format == "text" else None
        documents: list[Document] = []
        size = 0
        place = start.place if number == start.file else START
        for document in file.documents(text_documents, place):
            documents.append(document)
            size += len(document.data)
            if size >= BATCH_BYTES or len(documents) >= BATCH_DOCUMENTS:
                end = Frontier(number, file.place, before + file.position)
                yield Batch(tuple(documents), size, end, text_key)
                documents, size = [], 0
        if documents:
            end = Frontier(number, file.place, before + file.size)
            yield Batch(tuple(documents), size, end, text_key)
        before += file.size
