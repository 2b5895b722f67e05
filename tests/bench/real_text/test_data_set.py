"""A data set of real text: the tools make it, and the flags name it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.real_text.data_set import VOCABULARY, RealText, build_from_documents
from bench.real_text.text_sources import source_documents
from hetero.tools.launching.processes import StepFailure
from megatron.hetero.arguments import parse_args

pytestmark = pytest.mark.usefixtures("preloaded_ranks")

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --lr 1e-3 "
    "--max-position-embeddings 16 --micro-batch-size 1 --train-iters 1 --split 100,0,0"
)


def test_documents_become_tokens_of_the_vocabulary(tmp_path: Path) -> None:
    documents = source_documents(400_000)
    data = build_from_documents(tmp_path, documents)
    tokens = np.fromfile(tmp_path / "tokens_text_document.bin", dtype=np.uint16)
    assert data.tokens == len(tokens)
    assert 0.2 < data.tokens / sum(map(len, documents)) < 0.5
    assert tokens.max() < VOCABULARY
    # Every document ends with the token for its end.
    assert (tokens == 2).sum() == len(documents)


def test_runs_at_once_each_have_a_cache_and_share_the_rest(tmp_path: Path) -> None:
    data = RealText(tmp_path)
    args = [
        parse_args([*MODEL.split(), *flags], world_size=1)
        for flags in (data.flags, data.flags_with_cache(tmp_path / "mine"))
    ]
    assert [a.data_cache_path for a in args] == [str(tmp_path / "cache"), str(tmp_path / "mine")]
    assert args[0].data_path == args[1].data_path == [str(tmp_path / "tokens_text_document")]
    assert args[0].tokenizer_model == args[1].tokenizer_model


def test_too_little_text_for_the_vocabulary_is_said(tmp_path: Path) -> None:
    with pytest.raises(StepFailure) as failure:
        build_from_documents(tmp_path, ["A few words only."])
    assert "--vocab-size 8000 is too large for this text" in failure.value.sentence
