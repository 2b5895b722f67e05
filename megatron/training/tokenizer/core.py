"""megatron-core's own tokenizers, loaded and made whole.

megatron-core answers a wrong file with an assertion or a traceback, and leaves some of its
tokenizers without the ids that its own datasets ask for. Here the first becomes one sentence for
the user, and the second is filled in.
"""

from __future__ import annotations

import argparse
from typing import Any

from megatron.core.tokenizers import MegatronTokenizer

from hetero.errors import UserError
from megatron.training.tokenizer.files import first_line, flag_value, read_json, readable_file
from megatron.training.tokenizer.wrapper import NO_PAD, Tokenizer


def from_core(
    args: argparse.Namespace,
    library: str,
    path: str | None,
    *,
    source: str | None = None,
    **options: Any,
) -> Any:
    """megatron-core's tokenizer; whatever it raises becomes one sentence that names the file."""
    metadata = {"library": library, "model_type": "gpt"} | _user_metadata(args)
    try:
        return MegatronTokenizer.from_pretrained(path, metadata, **options)
    except Exception as error:
        raise UserError(
            f"{args.tokenizer_type} cannot be loaded from {source or path}: {_cause(error)}; "
            "check that the files are complete and fit --tokenizer-type"
        ) from error


def complete(
    core: Any,
    source: str,
    *,
    eod: int | None = None,
    pad: int | None = None,
    identity: dict[str, str] | None = None,
) -> Tokenizer:
    """Fill in the end-of-document and pad ids; without the first, documents run together."""
    found = _first_id(_core_id(core, "eod"), eod)
    if found is None:
        raise UserError(
            f"the tokenizer in {source} has no end-of-document token; use one that was trained "
            "with an end-of-sentence token, as tools/train_tokenizer.py does"
        )
    known_pad = _first_id(_core_id(core, "pad"), pad)
    return Tokenizer(
        core, eod=found, pad=NO_PAD if known_pad is None else known_pad, identity=identity or {}
    )


def _user_metadata(args: argparse.Namespace) -> dict[str, Any]:
    path = flag_value(args, "tokenizer_metadata")
    if path is None:
        return {}
    wanted = "a JSON object as megatron-core's MegatronTokenizer.write_metadata writes it"
    metadata = read_json(
        readable_file(path, "--tokenizer-metadata"), "--tokenizer-metadata", wanted
    )
    if not isinstance(metadata, dict):
        raise UserError(f"--tokenizer-metadata {path} is not {wanted}; write it again")
    return {key: value for key, value in metadata.items() if value is not None}


def _core_id(core: Any, name: str) -> Any:
    try:
        return getattr(core, name)
    except (AttributeError, NotImplementedError):
        return None


def _first_id(*candidates: Any) -> int | None:
    return next((int(id) for id in candidates if isinstance(id, int) and id >= 0), None)


def _cause(error: BaseException) -> str:
    """What a library said, without what megatron-core wrapped around it."""
    return first_line(error.__context__ or error)
