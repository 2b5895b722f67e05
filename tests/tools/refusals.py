"""What a program says of bad input: one sentence, exit code 2, and nothing else.

All that is wrong stands behind one sentence too, each thing in an indented line of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

Refused = Callable[..., str]


def refusal(
    capsys: pytest.CaptureFixture[str],
    main: Callable[[list[str]], object],
    words: str | Sequence[object],
    *,
    silent: bool = True,
    several: bool = False,
) -> str:
    """The sentence with which a program refuses these words.

    Not `silent` where it says more before; `several` where more than one thing is wrong.
    """
    capsys.readouterr()
    try:
        code = main(words.split() if isinstance(words, str) else [*map(str, words)])
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr()
    assert code == 2, said
    assert not (silent and said.out), said
    first, *things = said.err.splitlines()
    assert first.startswith("error: ")
    assert all(line.startswith("  ") for line in things), said.err
    assert several is bool(things), said.err
    return said.err
