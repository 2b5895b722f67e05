"""What the ranks of a node say on the stderr that they share."""

from __future__ import annotations

import sys

from hetero.errors import print_error


class Writes(list[str]):
    """A stream that keeps each write apart, as an unbuffered one hands them to the system."""

    def write(self, text: str) -> int:
        self.append(text)
        return len(text)

    def flush(self) -> None:
        pass


def test_an_error_is_one_write_so_that_no_other_rank_comes_between(monkeypatch) -> None:
    stream = Writes()
    monkeypatch.setattr(sys, "stderr", stream)
    print_error("rank 1: the link is down")
    assert [text for text in stream if text] == ["error: rank 1: the link is down\n"]
