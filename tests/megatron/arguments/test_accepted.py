"""Launches that are accepted, and what becomes of their flags: accepted.txt has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch_table import Launch, read_table


@pytest.mark.parametrize("launch", read_table(Path(__file__).with_name("accepted.txt")), ids=str)
def test_a_launch_becomes_what_its_line_says(parse, launch: Launch) -> None:
    flags = f"{launch.base} {launch.flags}"
    args = parse(flags, without=launch.without, world_size=launch.world_size)
    notes = []
    for outcome in launch.result.split("; "):
        if outcome.startswith("note "):
            notes.append(outcome.removeprefix("note "))
        else:
            name, value = outcome.split(" = ")
            assert getattr(args, name) == eval(value), name
    if notes:
        told = zip(args.ignored_flags, notes, strict=True)
        assert all(line.startswith(words) for line, words in told), args.ignored_flags
