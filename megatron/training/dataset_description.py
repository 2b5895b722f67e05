"""What token files were made with: PREFIX.json beside PREFIX.bin and PREFIX.idx.

tools/preprocess_data.py writes it. Token ids say nothing of the tokenizer that made them, and those
of another one train a model without a word of complaint. Files of other programs have none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SUFFIX = ".json"
_KIND = "token files"
NUMBERS = "NullTokenizer"
"""Text that holds token ids already, and runs that need no text: it stands for any tokenizer."""


@dataclass(frozen=True)
class TokenizerFacts:
    """A tokenizer, as far as two can be told apart by it."""

    type: str
    vocab_size: int
    digest: str | None
    """What it makes of a fixed text (`tokenizer_digest`); None where it takes no text."""
    model: str | None = field(default=None, compare=False)
    """Its file or name, for a person."""

    def __str__(self) -> str:
        name = f"{self.type} {self.model}" if self.model else self.type
        return f"{name} of {self.vocab_size:,} tokens"

    def difference(self, other: TokenizerFacts) -> str | None:
        """How the tokens of the two differ; None where nothing says so."""
        if self.vocab_size != other.vocab_size:
            return f"{self.vocab_size:,} tokens and not {other.vocab_size:,}"
        if self.digest != other.digest:
            return "other tokens for the same text"
        # Those without a digest take no text, and only their kinds tell them apart.
        if self.digest is None and self.type != other.type:
            return f"{self.type} and not {other.type}"
        return None


@dataclass(frozen=True)
class Description:
    """How token files came to be. `made` is for people: inputs, flags and versions."""

    tokenizer: TokenizerFacts
    append_eod: bool | None
    """Whether every document ends with the end token; None where parts differ."""
    made: Mapping[str, Any]

    def to_json(self) -> str:
        return json.dumps({"describes": _KIND, "version": 1, **asdict(self)}, indent=1) + "\n"


def read_description(prefix: str) -> Description | None:
    """The description beside token files; None where there is none, or a file of something else."""
    try:
        record = json.loads(Path(prefix + SUFFIX).read_bytes())
        if record["describes"] != _KIND:
            return None
        return Description(
            TokenizerFacts(**record["tokenizer"]), record["append_eod"], record["made"]
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None


def contradiction(prefix: str, tokenizer: TokenizerFacts) -> str | None:
    """How the tokenizer that made PREFIX differs from another one, as far as is known."""
    found = read_description(prefix)
    if found is None or NUMBERS in (found.tokenizer.type, tokenizer.type):
        return None
    difference = found.tokenizer.difference(tokenizer)
    return None if difference is None else f"{prefix} was made with {found.tokenizer}: {difference}"
