"""A data set of real text: the tools make it, and the flags name it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.real_text.data_set import VOCABULARY, build_from_documents
from bench.real_text.text_sources import source_documents

pytestmark = pytest.mark.usefixtures("preloaded_ranks")


def test_documents_become_tokens_of_the_vocabulary(tmp_path: Path) -> None:
    documents = source_documents(400_000)
    data = build_from_documents(tmp_path, documents)
    tokens = np.fromfile(tmp_path / "tokens_text_document.bin", dtype=np.uint16)
    assert data.tokens == len(tokens)
    assert 0.2 < data.tokens / sum(map(len, documents)) < 0.5
    assert tokens.max() < VOCABULARY
    # Every document ends with the token for its end.
    assert (tokens == 2).sum() == len(documents)
