"""A SentencePiece model gives the same tokens in Hugging Face's format, or is not written."""

from __future__ import annotations

import io
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import sentencepiece

from hetero.tools.train_tokenizer import LLAMA_OPTIONS
from megatron.hetero.huggingface.sentencepiece_model import write_sentencepiece

LINES = "\n".join(topics[name] for name in sorted(topics)[:40]).splitlines()
TEXTS = [" two  spaces\tand\n\nlines ", "Zwölf 漢字 🙂", "1234", ""]


def _model(folder: Path, **options: Any) -> Path:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=model,
        vocab_size=600,
        num_threads=1,
        minloglevel=2,
        **options,
    )
    path = folder / "tok.model"
    path.write_bytes(model.getvalue())
    return path


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize(
    "options", [LLAMA_OPTIONS, {}, {**LLAMA_OPTIONS, "add_dummy_prefix": False, "pad_id": 3}]
)
def test_the_tokens_are_the_same(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = _model(tmp_path, model_type=kind, **options)
    (tmp_path / "out").mkdir()
    assert write_sentencepiece(model, tmp_path / "out", special_tokens=["<own>"]) is None
    reference = sentencepiece.SentencePieceProcessor(str(model))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in [*LINES[:50], *TEXTS]:
        assert tokenizer(text).input_ids == reference.encode(text)
    assert len(tokenizer) == reference.vocab_size() + 1
    assert tokenizer.convert_tokens_to_ids("<own>") == reference.vocab_size()
    assert tokenizer.eos_token_id == reference.eos_id()
    assert tokenizer.pad_token_id == (reference.pad_id() if reference.pad_id() >= 0 else None)


def test_what_would_be_split_otherwise_is_not_written(tmp_path: Path) -> None:
    """Hugging Face's format puts a space after a symbol in the middle of a text."""
    model = _model(tmp_path, user_defined_symbols=["<x>"], **LLAMA_OPTIONS)
    (tmp_path / "out").mkdir()
    problem = write_sentencepiece(model, tmp_path / "out")
    assert problem is not None
    assert "it would split '<x>" in problem
    assert not list((tmp_path / "out").iterdir())
