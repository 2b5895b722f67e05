"""Reads the ids of tokens from the files of a tokenizer of Hugging Face's format.

transformers need not be installed, and no code of the tokenizer runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sentencepiece

from megatron.hetero.huggingface.configuration import read_json

SPECIAL = ("bos", "eos", "pad")


@dataclass(frozen=True)
class TokenIds:
    """The tokens of a tokenizer, by their text."""

    ids: Mapping[str, int]
    special: Mapping[str, int]
    """The ids of its `SPECIAL` tokens, as config.json names them (bos_token_id)."""

    def without_row(self, rows: int) -> list[str]:
        """The tokens beyond the last row of an embedding of `rows`, in the order of their ids."""
        beyond = ((id_, token) for token, id_ in self.ids.items() if id_ >= rows)
        return [token for _, token in sorted(beyond)]


def read_token_ids(folder: Path) -> TokenIds:
    """Read the ids from the files in a folder. Raises UserError for a damaged file."""
    ids = dict(_vocabulary(folder))
    config = _optional(folder / "tokenizer_config.json")
    ids |= {
        _text(token): int(id_)
        for id_, token in dict(config.get("added_tokens_decoder", {})).items()
    }
    named = _optional(folder / "special_tokens_map.json") | config
    special = {}
    for kind in SPECIAL:
        token = named.get(f"{kind}_token")
        if token is not None and _text(token) in ids:
            special[f"{kind}_token_id"] = ids[_text(token)]
    return TokenIds(ids, special)


def _vocabulary(folder: Path) -> Iterator[tuple[str, int]]:
    whole = _optional(folder / "tokenizer.json")
    vocabulary = dict(whole.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # Unigram's: pieces with their scores
        yield from ((str(entry[0]), number) for number, entry in enumerate(vocabulary))
    else:
        yield from vocabulary.items()
    for token in whole.get("added_tokens") or []:
        yield str(token["content"]), int(token["id"])
    if not whole:
        yield from _optional(folder / "vocab.json").items()
        yield from _pieces(folder / "tokenizer.model")
    yield from _optional(folder / "added_tokens.json").items()


def _pieces(model: Path) -> Iterator[tuple[str, int]]:
    """The pieces of tokenizer.model; none if the file is not a SentencePiece model."""
    processor = sentencepiece.SentencePieceProcessor()
    try:
        if not model.is_file() or not processor.Load(str(model)):
            return
    except (RuntimeError, OSError):
        return
    yield from ((processor.id_to_piece(i), i) for i in range(processor.vocab_size()))


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _text(token: Any) -> str:
    """A token's text. Some files store it in a mapping, with how it is matched."""
    return str(token["content"]) if isinstance(token, Mapping) else str(token)


def tokens_without_row(folder: Path, rows: int) -> str | None:
    """A note about tokens for which the embedding has no row; None if it has all."""
    beyond = read_token_ids(folder).without_row(rows)
    if not beyond:
        return None
    shown = ", ".join(map(repr, beyond[:5])) + (f" and {len(beyond) - 5} more" * (len(beyond) > 5))
    return (
        f"the tokenizer has tokens for which the model has no row of its {rows}: {shown}; as in "
        "transformers they must not occur in a text, and one that does is refused; "
        "--make-vocab-size-divisible-by 128 adds rows of zeros"
    )
