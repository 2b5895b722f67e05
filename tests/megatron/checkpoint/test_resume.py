"""What is loaded from a checkpoint, for every combination of flags and of what it holds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import fields

import pytest

from megatron.hetero.checkpoint.resume import (
    Holdings,
    ResumeFlags,
    Source,
    Sources,
    describe,
    missing_parts,
    resume_sources,
)

LOADED = (Source.CHECKPOINT, Source.EQUAL)


def combinations(kind: type) -> Iterator[dict[str, bool]]:
    names = [field.name for field in fields(kind)]
    for values in itertools.product((False, True), repeat=len(names)):
        yield dict(zip(names, values, strict=True))


CASES = [
    (ResumeFlags(**flags), Holdings(**holds))
    for flags in combinations(ResumeFlags)
    for holds in combinations(Holdings)
]


def allowed() -> Iterator[tuple[ResumeFlags, Holdings, Sources]]:
    """Every combination that is not refused."""
    for flags, holdings in CASES:
        sources = resume_sources(flags, holdings)
        if not list(flags.contradictions()) and not list(missing_parts(sources, holdings)):
            yield flags, holdings, sources


def test_all_parts_of_one_state_come_from_one_place() -> None:
    seen = list(allowed())
    assert len(seen) > 100
    for flags, holdings, sources in seen:
        resumes = holdings.progress and not flags.finetune
        assert sources.weights is Source.CHECKPOINT
        assert sources.is_new_run is not resumes
        parts = (sources.optimizer, sources.schedule_position, sources.random_states)
        if not resumes:
            assert set(parts) == {Source.ANEW}
            assert sources.schedule is Source.FLAGS
        # A schedule of the checkpoint goes on where it was; one of these flags only beside moments.
        if sources.schedule in LOADED:
            assert sources.schedule_position is Source.CHECKPOINT
        elif sources.schedule_position is Source.CHECKPOINT:
            assert flags.override_opt_param_scheduler
            assert sources.optimizer is Source.CHECKPOINT


def test_each_flag_has_its_meaning_whatever_stands_beside_it() -> None:
    for flags, holdings, sources in allowed():
        resumes = not sources.is_new_run
        assert (sources.optimizer is Source.CHECKPOINT) is (resumes and not flags.no_load_optim)
        assert (sources.random_states is Source.CHECKPOINT) is (resumes and not flags.no_load_rng)
        assert (sources.model_flags is Source.CHECKPOINT) is flags.use_checkpoint_args
        asked = resumes and flags.use_checkpoint_opt_param_scheduler
        assert (sources.schedule is Source.CHECKPOINT) is asked
        if flags.override_opt_param_scheduler:
            assert sources.schedule is Source.FLAGS
        if sources.schedule is Source.EQUAL:
            assert sources.optimizer is Source.CHECKPOINT
        assert holdings.optimizer or sources.optimizer is Source.ANEW
        assert holdings.random_states or sources.random_states is Source.ANEW
        assert holdings.schedule or sources.schedule_position is Source.ANEW


def test_a_flag_changes_only_what_it_is_for() -> None:
    reach = {
        "no_load_optim": {"optimizer", "schedule", "schedule_position"},
        "no_load_rng": {"random_states"},
        "use_checkpoint_args": {"model_flags"},
        "use_checkpoint_opt_param_scheduler": {"schedule", "schedule_position"},
        "override_opt_param_scheduler": {"schedule"},
    }
    for given in combinations(ResumeFlags):
        for name, changes in reach.items():
            pair = [
                resume_sources(ResumeFlags(**given | {name: value}), Holdings())
                for value in (False, True)
            ]
            changed = {
                field.name
                for field in fields(Sources)
                if getattr(pair[0], field.name) is not getattr(pair[1], field.name)
            }
            assert changed <= changes, (given, name)


def test_nothing_is_loaded_without_a_checkpoint() -> None:
    for given in combinations(ResumeFlags):
        sources = resume_sources(ResumeFlags(**given), None)
        states = {getattr(sources, field.name) for field in fields(Sources)}
        assert states == {Source.ANEW, Source.FLAGS}


@pytest.mark.parametrize(
    "pair",
    [
        ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"),
        ("finetune", "use_checkpoint_opt_param_scheduler"),
    ],
)
def test_a_pair_without_a_meaning_is_refused_beside_any_other_flag(pair: tuple[str, str]) -> None:
    for given in combinations(ResumeFlags):
        flags = ResumeFlags(**given | dict.fromkeys(pair, True))
        assert any(
            all(f"--{name.replace('_', '-')}" in said.replace("_", "-") for name in pair)
            for said in flags.contradictions()
        )


def test_the_line_names_every_part_once_under_its_source() -> None:
    for _, _, sources in allowed():
        line = describe(sources, schedule="constant 0.1")
        for part in (
            "weights",
            "the model's flags",
            "iteration",
            "optimizer state",
            "constant 0.1",
        ):
            assert line.count(part) == 1
        groups = dict(group.split(": ", 1) for group in line.split("; "))
        assert ("optimizer state" in groups["from the checkpoint"]) is (
            sources.optimizer is Source.CHECKPOINT
        )
        assert ("random states" in groups.get("anew", "")) is (sources.random_states is Source.ANEW)
    line = describe(resume_sources(ResumeFlags(), Holdings()), schedule="", random_states="why")
    assert line.endswith("anew: random states (why)")
