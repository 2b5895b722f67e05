"""A small real-text data set that needs no download: Python's own language reference, tokenized."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from examples.quickstart.processes import Step, run_step
from examples.quickstart.source_text import builtin_text
from tools.runs import ROOT

VOCABULARY = 8000
NAME = "Python's language reference (pydoc_data.topics)"


@dataclass(frozen=True)
class RealText:
    """A data set and its tokenizer, in one folder."""

    folder: Path

    @property
    def flags(self) -> list[str]:
        """Flags with which a run reads it."""
        return [
            *("--tokenizer-type", "SentencePieceTokenizer"),
            *("--tokenizer-model", str(self.folder / "tokenizer.model")),
            *("--data-path", str(self.folder / "tokens_text_document")),
            *("--data-cache-path", str(self.folder / "cache")),
        ]


def build_real_text(folder: Path) -> RealText:
    """Train a tokenizer on the text and tokenize it, with the project's own tools."""
    text, model = folder / "text.txt", folder / "tokenizer.model"
    text.write_text(builtin_text().text, encoding="utf-8")
    _tool(
        *("train_tokenizer", "--input", str(text)),
        *("--output-prefix", str(model.with_suffix("")), "--vocab-size", str(VOCABULARY)),
        folder=folder,
    )
    _tool(
        *("preprocess_data", "--input", str(text), "--output-prefix", str(folder / "tokens")),
        *("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(model)),
        *("--append-eod", "--workers", "2"),
        folder=folder,
    )
    return RealText(folder)


def _tool(name: str, *flags: str, folder: Path) -> None:
    run_step(
        Step(
            name=name,
            command=(sys.executable, str(ROOT / "tools" / f"{name}.py"), *flags),
            log=folder / f"{name}.log",
            directory=ROOT,
            environment=os.environ,
        )
    )
