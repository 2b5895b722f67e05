"""The tokenizer's files in a checkpoint, so that it needs none of the paths of the day it was made.

A training run copies them once into the folder of --save, under a name that depends on their
contents; a converted model has them in its own folder.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.hetero.tokenizer.files import huggingface_directory

ARGUMENT = "tokenizer_folder"
"""In a checkpoint's arguments: the copy's folder, beside the checkpoint's own."""
COMPANION_FOLDER = "huggingface"
"""Inside a converted checkpoint: tokenizer, config.json and generation settings of the model."""
_HUGGINGFACE_FILES = (
    *("tokenizer.json", "tokenizer.model*", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "*.tiktoken", "tekken.json"),
    *("spiece.model", "sentencepiece*.model", "tokenization_*.py", "chat_template*"),
    *("generation_config.json", "config.json"),
)
"""Patterns of the files that are copied from a folder of Hugging Face's format."""
_FILES: Mapping[str, Mapping[str, str]] = {
    "SentencePieceTokenizer": {"tokenizer_model": "tokenizer.model"},
    "GPTSentencePieceTokenizer": {"tokenizer_model": "tokenizer.model"},
    "Llama2Tokenizer": {"tokenizer_model": "tokenizer.model"},
    "GPT2BPETokenizer": {"vocab_file": "vocab.json", "merge_file": "merges.txt"},
    "BertWordPieceLowerCase": {"vocab_file": "vocab.txt"},
    "BertWordPieceCase": {"vocab_file": "vocab.txt"},
    "TikTokenizer": {"tokenizer_model": "tiktoken.json"},
    "HuggingFaceTokenizer": {"tokenizer_model": "."},
}
"""By --tokenizer-type: the flags that name files, and those files' names in the copy."""
_METADATA = {"tokenizer_metadata": "metadata.json"}
_COPYING = ".copying"


def huggingface_files(folder: Path) -> list[Path]:
    """The files of a model's folder that make its tokenizer and its settings, without weights."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file()
        and any(fnmatch.fnmatch(path.name, pattern) for pattern in _HUGGINGFACE_FILES)
    )


def copy_file(source: Path, target: Path) -> None:
    """Copy a file's contents; they are on disk on return."""
    with source.open("rb") as read, target.open("wb") as written:
        shutil.copyfileobj(read, written)
        written.flush()
        os.fsync(written.fileno())


def store_tokenizer(args: Mapping[str, Any], save: Path) -> str | None:
    """Copy the files of a run's tokenizer into `save`; returns the name of the copy's folder.

    Does nothing if the copy is there. None for a tokenizer without files. Raises OSError.
    """
    files = _files(args)
    if not files:
        return None
    content = hashlib.sha256()
    for name, path in sorted(files.items()):
        content.update(f"{name} {path.stat().st_size}\n".encode())
        content.update(path.read_bytes())
    target = save / f"tokenizer-{content.hexdigest()[:8]}"
    if not target.is_dir():
        temporary = target.with_name(target.name + _COPYING)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for name, path in files.items():
            copy_file(path, temporary / name)
        temporary.replace(target)
    return target.name


def own_folder(stored: Mapping[str, Any], checkpoint: Path) -> Path | None:
    """The copy that belongs to the checkpoint in this folder, whose arguments are `stored`."""
    copies = [checkpoint.parent / str(stored.get(ARGUMENT))] if stored.get(ARGUMENT) else []
    copies.append(checkpoint / COMPANION_FOLDER)
    return next((copy for copy in copies if copy.is_dir()), None)


def own_tokenizer(stored: Mapping[str, Any], checkpoint: Path) -> dict[str, str]:
    """The tokenizer's flags that name files, set to the checkpoint's own copy; empty without one.

    `stored` are the checkpoint's arguments, by destination.
    """
    copy = own_folder(stored, checkpoint)
    if copy is None:
        return {}
    names = {**_FILES.get(str(stored.get("tokenizer_type")), {}), **_METADATA}
    return {
        flag: str(copy if name == "." else copy / name)
        for flag, name in names.items()
        if stored.get(flag) and (copy / name).exists()
    }


def _files(args: Mapping[str, Any]) -> dict[str, Path]:
    """The files that the tokenizer's flags name, by their names in the copy."""
    names = _FILES.get(str(args.get("tokenizer_type")), {})
    files: dict[str, Path] = {}
    for flag, name in {**names, **_METADATA}.items():
        value = args.get(flag)
        if not value:
            continue
        if name == ".":
            folder = Path(huggingface_directory(str(value)))
            files |= {path.name: path for path in huggingface_files(folder)}
        else:
            files[name] = Path(value)
    return files
