"""Token files by megatron-core's own builder."""

from __future__ import annotations

from pathlib import Path

import numpy
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

Documents = list[list[list[int]]]


def build(prefix: Path, documents: Documents, dtype: type = numpy.uint16) -> str:
    """The prefix of the files. A document may be several sequences."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for sequences in documents:
        for tokens in sequences:
            builder.add_item(torch.tensor(tokens, dtype=torch.int64))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return str(prefix)
