"""PREFIX.json, the description beside PREFIX.bin and PREFIX.idx: which tokenizer made them.

hetero preprocess-data writes it. Token ids alone do not identify their tokenizer, and a run with
the wrong one trains without an error. Files made by other programs have no description.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SUFFIX = ".json"
_KIND = "token files"
NULL_TOKENIZER = "NullTokenizer"
"""The type for text that holds token ids: compatible with every tokenizer."""


@dataclass(frozen=True)
class TokenizerInfo:
    """Identifies a tokenizer for comparison."""

    type: str
    vocab_size: int
    digest: str | None
    """Digest of its tokens for a fixed text (`tokenizer_digest`); None if it takes no text."""
    model: str | None = field(default=None, compare=False)
    """Its file or name, for messages."""
    begin: tuple[int, ...] = ()
    """The tokens that each document begins with: <s> or none."""

    def __str__(self) -> str:
        name = f"{self.type} {self.model}" if self.model else self.type
        begin = f", each document after token {self.begin[0]} (<s>)" if self.begin else ""
        return f"{name} of {self.vocab_size:,} tokens{begin}"

    def difference(self, other: TokenizerInfo) -> str | None:
        """How the two differ, for a message; None if they look the same."""
        if self.vocab_size != other.vocab_size:
            return f"{self.vocab_size:,} tokens and not {other.vocab_size:,}"
        if self.digest != other.digest:
            return "other tokens for the same text"
        if self.begin != other.begin:
            what, flag = ("<s>", "on") if self.begin else ("no <s>", "off")
            return f"{what} before each document; give --tokenizer-bos {flag}"
        # Tokenizers without a digest take no text: compare their types.
        if self.digest is None and self.type != other.type:
            return f"{self.type} and not {other.type}"
        return None


@dataclass(frozen=True)
class Description:
    """Contents of PREFIX.json. `made` is informational: inputs, flags and versions."""

    tokenizer: TokenizerInfo
    append_eod: bool | None
    """Whether every document ends with the end-of-document token; None if merged parts differ."""
    made: Mapping[str, Any]

    def to_json(self) -> str:
        return json.dumps({"describes": _KIND, "version": 1, **asdict(self)}, indent=1) + "\n"


def read_description(prefix: str) -> Description | None:
    """Read PREFIX.json; None if it is missing, unreadable or another kind of file."""
    try:
        record = json.loads(Path(prefix + SUFFIX).read_bytes())
        if record["describes"] != _KIND:
            return None
        tokenizer = record["tokenizer"]
        # Files without the entry are older than --tokenizer-bos.
        tokenizer["begin"] = tuple(tokenizer.get("begin", ()))
        return Description(TokenizerInfo(**tokenizer), record["append_eod"], record["made"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def tokenizer_mismatch(prefix: str, tokenizer: TokenizerInfo) -> str | None:
    """How the tokenizer that made PREFIX differs from `tokenizer`; None if none is known to."""
    found = read_description(prefix)
    if found is None or NULL_TOKENIZER in (found.tokenizer.type, tokenizer.type):
        return None
    difference = found.tokenizer.difference(tokenizer)
    return None if difference is None else f"{prefix} was made with {found.tokenizer}: {difference}"
