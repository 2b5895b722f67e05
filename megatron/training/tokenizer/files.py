"""The files and flags of a tokenizer; whatever is wrong with one becomes a sentence."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from hetero.errors import UserError


def model_of(args: argparse.Namespace) -> str:
    model = flag_value(args, "tokenizer_model")
    if not model:
        raise UserError(f"--tokenizer-type {args.tokenizer_type} needs --tokenizer-model")
    return str(model)


def readable_file(path: str, flag: str) -> str:
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


def read_json(path: str, flag: str, wanted: str) -> Any:
    try:
        return json.loads(Path(path).read_bytes())
    except ValueError as error:
        raise UserError(f"{flag} {path} is not {wanted} ({first_line(error)})") from error


def huggingface_directory(name: str) -> str:
    """The directory of a tokenizer: as given, or where Hugging Face's cache already has it."""
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
    """A flag that a caller may not have: tools build these arguments by hand."""
    value = getattr(args, name, None)
    return default if value is None else value


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(" .:") if lines else type(error).__name__
