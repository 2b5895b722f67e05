"""What tests that train share: real text, tokenized once, and runs of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from hetero.tools import preprocess_data, train_tokenizer
from tests.distributed.harness import Training, train


@dataclass(frozen=True)
class Corpus:
    """A tokenizer and a dataset, and the flags that name them."""

    tokenizer: Path
    prefix: Path
    cache: Path

    @property
    def flags(self) -> list[str]:
        return [
            *("--tokenizer-type", "SentencePieceTokenizer"),
            *("--tokenizer-model", str(self.tokenizer)),
            *("--data-path", str(self.prefix)),
            *("--data-cache-path", str(self.cache)),
            *("--split", "90,10,0"),
        ]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    text = folder / "text.txt"
    text.write_text("\n\n".join(topics[name] for name in sorted(topics)[:40]))
    words = ["--input", str(text), "--output-prefix", str(folder / "tok"), "--vocab-size", "500"]
    assert train_tokenizer.main(words) == 0
    model = folder / "tok.model"
    words = ["--input", str(text), "--output-prefix", str(folder / "data"), "--append-eod"]
    kind = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(model)]
    assert preprocess_data.main([*words, *kind, "--workers", "1"]) == 0
    return Corpus(tokenizer=model, prefix=folder / "data_text_document", cache=folder / "cache")


OneProcess = Callable[[Sequence[str]], tuple[Training, Path]]


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory: pytest.TempPathFactory) -> OneProcess:
    """Trains on one process, once for the same flags: the run, and its folder.

    The folder has the metrics and, below `saved`, a checkpoint of every iteration.
    """
    known: dict[tuple[str, ...], tuple[Training, Path]] = {}

    def run(flags: Sequence[str]) -> tuple[Training, Path]:
        if (key := tuple(flags)) not in known:
            folder = tmp_path_factory.mktemp("one")
            saving = ["--save", str(folder / "saved"), "--save-interval", "1"]
            known[key] = train([*flags, *saving], 1, folder), folder
        return known[key]

    return run
