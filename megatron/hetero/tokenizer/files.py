"""Reads the files and flags of a tokenizer. Raises UserError, naming the flag and the file."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
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
