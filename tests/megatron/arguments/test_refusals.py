"""Launches that are refused, each in a sentence that says what is wrong: refusals.txt has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch_table import Launch, read_table


@pytest.mark.parametrize("launch", read_table(Path(__file__).with_name("refusals.txt")), ids=str)
def test_a_launch_is_refused_in_words(refusal, launch: Launch) -> None:
    flags, without = f"{launch.base} {launch.flags}", launch.without
    assert launch.result in refusal(flags, without=without, world_size=launch.world_size)
