"""Numbers and their nouns agree, everywhere in messages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hetero.words import counted

ROOT = Path(__file__).resolve().parents[2]
NOUNS = "ranks|meshes|connections|documents|datasets|operators|cores|pipeline stages|workers"
UNCOUNTED = re.compile(rf"\{{(?!counted\()([^{{}}]+)\}} ({NOUNS})\b")
NEVER_ONE = (
    *("outside the plan's", "none of the {world_size}", "All {count} operators"),
    *("and the {microbatches} micro batches", "cannot be shared by {stages}"),
)
"""What such a sentence holds where it is never said of one."""


@pytest.mark.parametrize(
    ("number", "words", "text"),
    [
        (1, ("rank",), "1 rank"),
        (2, ("rank",), "2 ranks"),
        (0, ("rank",), "0 ranks"),
        (1, ("process", "processes"), "1 process"),
        (3, ("process", "processes"), "3 processes"),
    ],
)
def test_a_noun_follows_its_number(number: int, words: tuple[str, ...], text: str) -> None:
    assert counted(number, *words) == text


def test_no_message_writes_a_plural_after_a_number_that_may_be_one() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for folder in ("hetero", "megatron/training", "tools", "examples")
        for path in ROOT.glob(f"{folder}/**/*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if UNCOUNTED.search(line) and not any(words in line for words in NEVER_ONE)
    ]
    assert found == []
