"""One real text for each type of tokenizer, with files of that type trained on it."""

from __future__ import annotations

import json
from pathlib import Path

from bench.public_training.shrinking import TEXT, TOKENIZER_FILES, TOKENS
from bench.real_text.data_set import run_tool

VOCABULARY = 1000
END = "<|endoftext|>"


def build_text(kind: str, text: str, folder: Path) -> None:
    """Train a tokenizer of this type and tokenize, where a shrunk command looks for them.

    `folder` is what TEXT stands for. Raises StepFailure where a step fails.
    """
    files = {
        flag: folder / name.removeprefix(f"{TEXT}/") for flag, name in TOKENIZER_FILES[kind].items()
    }
    own = folder / next(iter(TOKENIZER_FILES[kind].values())).split("/")[1]
    own.mkdir(parents=True, exist_ok=True)
    source = own / "text.txt"
    source.write_text(text, encoding="utf-8")
    if kind == "Llama2Tokenizer":
        _train_sentencepiece(source, own)
    else:
        _train_bytes(text, own)
    run_tool(
        *("preprocess_data", "--input", str(source)),
        *("--output-prefix", str(own / TOKENS.removesuffix("_text_document"))),
        *("--tokenizer-type", kind, "--append-eod", "--workers", "1"),
        *(word for flag, path in files.items() for word in (flag, str(path))),
        folder=own,
    )


def _train_sentencepiece(source: Path, own: Path) -> None:
    run_tool(
        *("train_tokenizer", "--input", str(source)),
        *("--output-prefix", str(own / "tokenizer"), "--vocab-size", str(VOCABULARY)),
        folder=own,
    )


def _train_bytes(text: str, own: Path) -> None:
    """GPT-2's kind: both as its two files and as a folder of Hugging Face's."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        text.splitlines(), vocab_size=VOCABULARY, special_tokens=[END], show_progress=False
    )
    tokenizer.save_model(str(own))
    tokenizer.save(str(own / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (own / "tokenizer_config.json").write_text(json.dumps(settings))
