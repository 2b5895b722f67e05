"""What the output of a run depends on, for the description beside its files."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetero.tools.text_input import InputFile

# Inputs have an entry of their own; the others change no token.
_NO_PART_OF_IT = frozenset("input output_prefix overwrite workers log_interval".split())
_TOKENIZER_FILES = ("tokenizer_model", "vocab_file", "merge_file", "tokenizer_metadata")
_LIBRARIES = ("megatron-core", "sentencepiece", "tokenizers", "transformers", "tiktoken")


def describe_run(args: argparse.Namespace, files: Sequence[InputFile]) -> dict[str, Any]:
    """Inputs, tokenizer, flags and libraries, for JSON.

    Files are told apart by path, size and time of change, not by their content.
    """
    left_out = _NO_PART_OF_IT.union(_TOKENIZER_FILES)
    named = [str(value) for name in _TOKENIZER_FILES if (value := getattr(args, name))]
    return {
        "inputs": [[*_identity(Path(file.path)), file.format] for file in files],
        "tokenizer files": [entry for name in named for entry in _tokenizer_files(name)],
        "flags": {name: value for name, value in vars(args).items() if name not in left_out},
        "library versions": {name: _version(name) for name in _LIBRARIES},
    }


def _tokenizer_files(name: str) -> list[list[Any]]:
    path = Path(name)
    if path.is_dir():
        return [_identity(entry) for entry in sorted(path.iterdir()) if entry.is_file()]
    if path.exists():
        return [_identity(path)]
    # The name of a repository, which Hugging Face's cache keeps under the commit it was read at.
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, "tokenizer_config.json")
    except (ImportError, ValueError):
        cached = None
    return [[name, str(cached)]]


def _identity(path: Path) -> list[Any]:
    status = path.stat()
    return [os.path.abspath(path), status.st_size, status.st_mtime_ns]


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None
