"""Data sets of real text that need no download, tokenized with a tokenizer trained on them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.real_text.text_sources import language_reference
from hetero.tools.launching.processes import Step, run_step

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 8000
NAME = "Python's language reference (pydoc_data.topics)"
TOKENIZER_CHARACTERS = 4_000_000
"""A tokenizer is trained on no more than this: seconds instead of minutes, and the same tokens."""
_TOKEN_BYTES = 2
"""tools/preprocess_data.py writes 16-bit tokens for a vocabulary of this size."""


@dataclass(frozen=True)
class RealText:
    """A data set and its tokenizer, in one folder."""

    folder: Path

    @property
    def flags(self) -> list[str]:
        """Flags with which one run after the other reads it."""
        return self.flags_with_cache(self.folder / "cache")

    def flags_with_cache(self, cache: Path) -> list[str]:
        """The same with a folder for the shuffled order: two runs at once must not share one."""
        return [
            *("--tokenizer-type", "SentencePieceTokenizer"),
            *("--tokenizer-model", str(self.folder / "tokenizer.model")),
            *("--data-path", str(self.folder / "tokens_text_document")),
            *("--data-cache-path", str(cache)),
        ]

    @property
    def tokens(self) -> int:
        return (self.folder / "tokens_text_document.bin").stat().st_size // _TOKEN_BYTES


def build_real_text(folder: Path) -> RealText:
    """Python's language reference, as one text whose paragraphs are documents."""
    text = folder / "text.txt"
    text.write_text(language_reference(), encoding="utf-8")
    return _tokenized(folder, text, tokenizer_text=text, workers=2)


def build_from_documents(folder: Path, documents: Sequence[str], *, workers: int = 2) -> RealText:
    """A data set of the given documents. Raises StepFailure where they are too little text."""
    text, sample = folder / "text.jsonl", folder / "tokenizer.jsonl"
    _write_json_lines(text, documents)
    taken, total = 0, 0
    while taken < len(documents) and total < TOKENIZER_CHARACTERS:
        total += len(documents[taken])
        taken += 1
    _write_json_lines(sample, documents[:taken])
    return _tokenized(folder, text, tokenizer_text=sample, workers=workers)


def _write_json_lines(path: Path, documents: Sequence[str]) -> None:
    lines = (json.dumps({"text": document}) + "\n" for document in documents)
    path.write_text("".join(lines), encoding="utf-8")


def _tokenized(folder: Path, text: Path, *, tokenizer_text: Path, workers: int) -> RealText:
    """Train a tokenizer and tokenize, with the project's own tools."""
    model = folder / "tokenizer.model"
    run_tool(
        *("train_tokenizer", "--input", str(tokenizer_text)),
        *("--output-prefix", str(model.with_suffix("")), "--vocab-size", str(VOCABULARY)),
        folder=folder,
    )
    run_tool(
        *("preprocess_data", "--input", str(text), "--output-prefix", str(folder / "tokens")),
        *("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(model)),
        *("--append-eod", "--workers", str(workers)),
        folder=folder,
    )
    return RealText(folder)


def run_tool(name: str, *flags: str, folder: Path) -> None:
    """Run a tool of this project; what it says goes to a log in `folder`. Raises StepFailure."""
    run_step(
        Step(
            name=name,
            command=(sys.executable, str(ROOT / "tools" / f"{name}.py"), *flags),
            log=folder / f"{name}.log",
            directory=ROOT,
            environment=os.environ,
        )
    )
