"""The files of a tokenizer: as the flags name them, and as a checkpoint stores them.

A training run copies them once into the folder of --save, under a name that depends on their
contents; a converted model has them in its own folder. So a checkpoint needs none of the paths of
the day it was made. Errors are UserErrors that name the flag and the file.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetero.errors import UserError


def required_flag(args: argparse.Namespace, name: str) -> Any:
    """The value of the flag with this destination, which the tokenizer's type needs."""
    value = flag_value(args, name)
    if not value:
        raise UserError(f"--tokenizer-type {args.tokenizer_type} needs --{name.replace('_', '-')}")
    return value


def require_readable_file(path: str | Path, flag: str) -> str:
    """The path as a string. Raises UserError unless the file can be opened."""
    path = str(path)
    if os.path.isdir(path):
        raise UserError(f"{flag} {path} is a directory; give the file inside it")
    try:
        with open(path, "rb"):
            return path
    except OSError as error:
        raise UserError(
            f"{flag} {path} cannot be read ({error.strerror}); check the path"
        ) from error


def read_json(path: str, flag: str, expected: str) -> Any:
    """The JSON value in a file; the error says that it is not `expected`."""
    try:
        return json.loads(Path(path).read_bytes())
    except ValueError as error:
        raise UserError(f"{flag} {path} is not {expected} ({first_line(error)})") from error


def huggingface_directory(name: str) -> str:
    """The directory of a tokenizer: `name`, or that of the model `name` in Hugging Face's cache."""
    if os.path.isdir(name):
        return name
    remedy = "give a local directory, as `hf download NAME --local-dir DIR` makes one"
    if os.path.exists(name):
        raise UserError(f"--tokenizer-model {name} is a file, not a directory; {remedy}")
    require_transformers("HuggingFaceTokenizer")
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(name, local_files_only=True))
    except Exception as error:
        raise UserError(
            f"--tokenizer-model {name} is neither a directory nor in Hugging Face's cache on this "
            f"machine; {remedy}"
        ) from error


def require_transformers(kind: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        raise UserError(f"--tokenizer-type {kind} needs transformers; run: pip install '.[hf]'")


def flag_value(args: argparse.Namespace, name: str, default: Any = None) -> Any:
    """A flag's value, or `default` if it is None or absent: tools pass only some of the flags."""
    value = getattr(args, name, None)
    return default if value is None else value


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without punctuation at its end."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(" .:") if lines else type(error).__name__


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
