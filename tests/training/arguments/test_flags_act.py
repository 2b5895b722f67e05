"""No flag is taken and then forgotten: each is shown to act."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.training.arguments.parser import build_parser
from megatron.training.cpu_shim import cpu_shim
from tests.training.arguments.flag_rows import ELSEWHERE, ROWS, Row

TESTS = Path(__file__).resolve().parents[2]
OPTIONS = [action for action in build_parser()._actions if action.dest != "help"]
# Their tests are those of checkpoints.
CHECKPOINT_GROUP = "checkpoint"


@pytest.fixture(autouse=True)
def _without_accelerator(engine):
    with cpu_shim():
        yield


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_flag_brings_what_a_launch_without_it_does_not_have(parse, row: Row) -> None:
    def observed(flags: str) -> dict[str, Any]:
        args = parse(f"{row.base} {flags}", without=row.without, world_size=row.world_size)
        return row.observer(args)

    # A name that nothing reports would pass for nothing.
    assert observed(row.words)[row.name] == row.expected
    assert observed("").get(row.name) != row.expected


def _checkpoint_flags() -> set[str]:
    groups = build_parser()._action_groups
    return {
        flag
        for group in groups
        if CHECKPOINT_GROUP in (group.title or "")
        for action in group._group_actions
        for flag in action.option_strings
    }


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.option_strings[0])
def test_a_flag_is_shown_to_act(option) -> None:
    flags = set(option.option_strings)
    if flags & _checkpoint_flags():
        return
    shown = flags & {row.flag for row in ROWS}
    elsewhere = flags & set(ELSEWHERE)
    assert shown or elsewhere, "no test shows what this flag does"
    for flag in elsewhere:
        assert flag in (TESTS / ELSEWHERE[flag]).read_text()


def test_every_flag_of_a_row_exists() -> None:
    known = {flag for option in OPTIONS for flag in option.option_strings}
    assert set(ELSEWHERE) <= known
    assert {row.flag for row in ROWS} <= known
