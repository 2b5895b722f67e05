"""No flag is taken and then forgotten: each is used by the program, or said to do nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.training.arguments.ignored import IGNORED, WITHOUT_EFFECT
from megatron.training.arguments.parser import build_parser

TRAINING = Path(__file__).resolve().parents[3] / "megatron" / "training"
CHECKS = TRAINING / "arguments" / "checks"
PROGRAM = "".join(path.read_text() for path in TRAINING.glob("*.py"))
REFUSED_OR_DERIVED = "".join(path.read_text() for path in CHECKS.glob("*.py"))

OPTIONS = [action for action in build_parser()._actions if action.dest != "help"]


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.option_strings[0])
def test_a_flag_has_an_effect_or_is_said_to_have_none(option) -> None:
    is_listed = any(flag in IGNORED or flag in WITHOUT_EFFECT for flag in option.option_strings)
    is_used = re.search(rf"\b{option.dest}\b", PROGRAM + REFUSED_OR_DERIVED) is not None
    assert is_listed or is_used
    if is_listed:
        in_program = re.search(rf"\bargs\.{option.dest}\b", PROGRAM) is not None
        assert not in_program, "listed as without effect although the program reads it"


def test_every_flag_listed_as_without_effect_exists() -> None:
    known = {flag for option in OPTIONS for flag in option.option_strings}
    assert set(WITHOUT_EFFECT) <= known
