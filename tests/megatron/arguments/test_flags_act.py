"""No flag is taken and then forgotten: each is shown to act."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.hetero.arguments.parser import build_parser
from megatron.hetero.cpu_shim import cpu_shim
from tests.launch_table import Launch, read_table
from tests.megatron.arguments import observers as see
from tests.megatron.launches import configured

TESTS = Path(__file__).resolve().parents[2]
OPTIONS = [action for action in build_parser()._actions if action.dest != "help"]
# Their tests are those of checkpoints.
CHECKPOINT_GROUP = "checkpoint"
ELSEWHERE = {
    flag: launch.result
    for launch in read_table(Path(__file__).with_name("shown_elsewhere.txt"))
    for flag in launch.flags.split()
}


@dataclass(frozen=True)
class Row:
    """A line of flags_act.txt."""

    words: str
    """The flag and its value."""
    base: str
    """Flags of both launches."""
    observer: see.Observer
    name: str
    expected: Any
    launch: Launch

    @classmethod
    def of(cls, launch: Launch) -> Row:
        words, _, more = launch.flags.partition(" with ")
        observer, _, seen = launch.result.partition(" ")
        name, _, value = seen.rpartition(" = ")
        name = name or words.split()[0].removeprefix("--").replace("-", "_")
        expected = eval(value, {"torch": torch})
        return cls(words, f"{launch.base} {more}", getattr(see, observer), name, expected, launch)

    def __str__(self) -> str:
        return self.words


ROWS = [Row.of(launch) for launch in read_table(Path(__file__).with_name("flags_act.txt"))]


@pytest.fixture(autouse=True)
def _without_accelerator(engine):
    with cpu_shim():
        yield


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_flag_brings_what_a_launch_without_it_does_not_have(row: Row) -> None:
    def observed(flags: str) -> dict[str, Any]:
        launch = row.launch
        flags = f"{row.base} {flags}"
        how = {"without": launch.without, "world_size": launch.world_size}
        return row.observer(configured(flags, **how))

    # A name that nothing reports would pass for nothing.
    assert observed(row.words)[row.name] == row.expected
    assert observed("").get(row.name) != row.expected


@functools.cache
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
    shown = flags & {row.words.split()[0] for row in ROWS}
    elsewhere = flags & set(ELSEWHERE)
    assert shown or elsewhere, "no test shows what this flag does"
    for flag in elsewhere:
        assert flag in (TESTS / ELSEWHERE[flag]).read_text()


def test_every_flag_of_a_row_exists() -> None:
    known = {flag for option in OPTIONS for flag in option.option_strings}
    assert set(ELSEWHERE) <= known
    assert {row.words.split()[0] for row in ROWS} <= known
