"""Loads megatron-core's tokenizers.

If a file is wrong, megatron-core raises an assertion or an error of a library, and some of its
tokenizers lack ids that its own datasets need. Here the first becomes a UserError, and the ids are
filled in.
"""

from __future__ import annotations

import argparse
from typing import Any

from megatron.core.tokenizers import MegatronTokenizer

from hetero.errors import UserError
from megatron.hetero.tokenizer.files import (
    first_line,
    flag_value,
    read_json,
    require_readable_file,
)
from megatron.hetero.tokenizer.wrapper import NO_PAD, Tokenizer


def load_core_tokenizer(
    args: argparse.Namespace,
    library: str,
    path: str | None,
    *,
    source: str | None = None,
    **options: Any,
) -> Any:
    """megatron-core's tokenizer of a library, from its file. Raises UserError.

    Args:
        source: what an error names instead of `path`.
        options: for megatron-core's own constructor.
    """
    metadata = {"library": library, "model_type": "gpt"} | _user_metadata(args)
    try:
        return MegatronTokenizer.from_pretrained(path, metadata, **options)
    except Exception as error:
        raise UserError(
            f"{args.tokenizer_type} cannot be loaded from {source or path}: {_cause(error)}; "
            "check that the files are complete and fit --tokenizer-type"
        ) from error


def wrap_core_tokenizer(
    core: Any,
    source: str,
    *,
    eod: int | None = None,
    pad: int | None = None,
    identity: dict[str, str] | None = None,
    begin: tuple[int, ...] = (),
) -> Tokenizer:
    """A tokenizer that has megatron-core's end-of-document and pad ids, or else `eod` and `pad`.

    Raises UserError if there is no end-of-document id, because documents would run together.
    `source` is what an error names, `identity` part of the tokenizer's `unique_identifiers`.
    """
    eod_id = _first_id(_core_id(core, "eod"), eod)
    if eod_id is None:
        raise UserError(
            f"the tokenizer in {source} has no end-of-document token; use one that was trained "
            "with an end-of-sentence token, as hetero train-tokenizer does"
        )
    pad_id = _first_id(_core_id(core, "pad"), pad)
    return Tokenizer(
        core,
        eod=eod_id,
        pad=NO_PAD if pad_id is None else pad_id,
        identity=identity or {},
        begin=begin,
    )


def _user_metadata(args: argparse.Namespace) -> dict[str, Any]:
    """The values in the file of --tokenizer-metadata."""
    path = flag_value(args, "tokenizer_metadata")
    if path is None:
        return {}
    flag = "--tokenizer-metadata"
    expected = "a JSON object as megatron-core's MegatronTokenizer.write_metadata writes it"
    metadata = read_json(require_readable_file(path, flag), flag, expected)
    if not isinstance(metadata, dict):
        raise UserError(f"{flag} {path} is not {expected}; write it again")
    return {key: value for key, value in metadata.items() if value is not None}


def _core_id(core: Any, name: str) -> Any:
    """A special token's id of megatron-core's tokenizer; None if it does not define one."""
    try:
        return getattr(core, name)
    except (AttributeError, NotImplementedError):
        return None


def _first_id(*candidates: Any) -> int | None:
    """The first candidate that is an id; libraries use negative numbers for none."""
    return next((int(id) for id in candidates if isinstance(id, int) and id >= 0), None)


def _cause(error: BaseException) -> str:
    """The library's message, without that of megatron-core's error around it."""
    return first_line(error.__context__ or error)
