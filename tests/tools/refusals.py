"""What a program says of bad input: one sentence, exit code 2, and nothing else.

All that is wrong stands behind one sentence too, each thing in an indented line of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest


def refusal(
    capsys: pytest.CaptureFixture[str],
    main: Callable[[list[str]], object],
    words: str | Sequence[object],
) -> str:
    """The sentence with which a program refuses these words."""
    capsys.readouterr()
    try:
        code = main(words.split() if isinstance(words, str) else [*map(str, words)])
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr()
    assert (code, said.out) == (2, ""), said
    first, *things = said.err.splitlines()
    assert first.startswith("error: ")
    assert all(line.startswith("  ") for line in things), said.err
    return said.err
