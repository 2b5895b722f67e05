"""Launches that are refused, each in a sentence that says what is wrong: refusals.txt has them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

TABLE = Path(__file__).with_name("refusals.txt")


def _lines() -> Iterator[tuple[str, str, int, str]]:
    """Flags, those left out, the number of ranks and the words of each line."""
    without, world, base = "", 1, ""
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            settings = dict(part.split(" ", 1) for part in line.strip("[]").split(" | ")[1:])
            without, base = settings.get("without", ""), settings.get("with", "")
            world = int(settings.get("world", 1))
        elif line and not line.startswith("#"):
            flags, _, words = line.rpartition("=> ")
            yield f"{base} {flags}", without, world, words


@pytest.mark.parametrize(("flags", "without", "world", "words"), _lines())
def test_a_launch_is_refused_in_words(
    refusal, flags: str, without: str, world: int, words: str
) -> None:
    assert words in refusal(flags, without=without, world_size=world)
