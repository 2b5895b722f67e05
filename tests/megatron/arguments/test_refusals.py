"""Every refusal of a command line: refusals.txt has them, flags and words of the sentences."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from megatron.hetero.arguments import build_parser, parser
from tests.launch_table import Launch, read_table
from tests.megatron.launches import configured
from tests.sentences import all_said_of

LAUNCHES = list(read_table(Path(__file__).with_name("refusals.txt")))


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_a_launch_is_refused_in_words(refusal, launch: Launch) -> None:
    flags, without = f"{launch.base} {launch.flags}", launch.without
    said = refusal(flags, without=without, world_size=launch.world_size)
    for words in launch.result.removeprefix("alone ").split(" && "):
        assert words in said
    if launch.result.startswith("alone "):
        assert "\n" not in said


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_the_rules_does_not_matter(seed: int, monkeypatch) -> None:
    def said(launch: Launch) -> set[str]:
        how = {"without": launch.without, "world_size": launch.world_size}
        return set(all_said_of(configured, f"{launch.base} {launch.flags}", **how).splitlines())

    launches = random.Random(seed).sample(LAUNCHES, 20)
    expected = [said(launch) for launch in launches]
    shuffled = random.Random(seed).sample(parser.RULES, len(parser.RULES))
    monkeypatch.setattr(parser, "RULES", shuffled)
    assert [said(launch) for launch in launches] == expected


def test_a_rule_reads_flags_and_what_other_rules_set() -> None:
    known = set(vars(build_parser().parse_args([]))) | {"typed_flags", "world_size"}
    known |= {name for rule in parser.RULES for name in rule.sets}
    assert [
        rule for rule in parser.RULES if not rule.reads | rule.flags | rule.known <= known
    ] == []
