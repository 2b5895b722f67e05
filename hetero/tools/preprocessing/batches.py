"""Documents in batches: what travels to a worker process at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetero.tools.text_input import Document, InputFile

BATCH_BYTES = 1 << 18
BATCH_DOCUMENTS = 1000


@dataclass(frozen=True)
class Batch:
    """Documents that travel to a worker together."""

    documents: tuple[Document, ...]
    text_bytes: int
    disk_bytes: int
    """Bytes of the input read up to its end, compressed as they are; for a progress bar."""
    text_key: str | None = None


def cut_batches(files: Sequence[InputFile], text_documents: str) -> Iterator[Batch]:
    """Group the documents of each file; where a batch ends does not show in the output."""
    before = 0
    for file in files:
        text_key = "text" if file.format == "text" else None
        documents: list[Document] = []
        size = 0
        for document in file.documents(text_documents):
            documents.append(document)
            size += len(document.data)
            if size >= BATCH_BYTES or len(documents) >= BATCH_DOCUMENTS:
                yield Batch(tuple(documents), size, before + file.position, text_key)
                documents, size = [], 0
        before += file.size
        if documents:
            yield Batch(tuple(documents), size, before, text_key)
