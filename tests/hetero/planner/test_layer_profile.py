"""Profiles: measured points, and interpolation only where a profile allows it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from hetero.planner.layer_profile import (
    AcceleratorProfile,
    MeasuredProfile,
    PartCosts,
    PassTimes,
    Point,
    ProfileError,
    load_profile,
)


def costs(seconds: float) -> PartCosts:
    layer = PassTimes(seconds, 2 * seconds)
    return PartCosts(
        layer=layer, embedding=PassTimes(0.1, 0.2), head=layer, layer_activation_bytes=seconds * 1e6
    )


POINTS = {Point(1, 1, 128): costs(1.0), Point(1, 4, 128): costs(4.0)}


def profile(*interpolate: str) -> MeasuredProfile:
    measured = AcceleratorProfile(
        POINTS,
        1e-9,
        1e-3,
        reduction_seconds_per_parameter=1e-10,
        interpolate=interpolate,
        source="a test",
    )
    return MeasuredProfile({"H200": measured}, {"layers": 2})


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(profile("micro_batch").to_mapping()))
    assert load_profile(file) == profile("micro_batch")


def test_a_lacking_point_is_named_and_not_guessed() -> None:
    with pytest.raises(ProfileError, match=r"lacks tensor size 1, micro-batch 2, .* lets nothing"):
        profile().costs("H200", Point(1, 2, 128))
    with pytest.raises(ProfileError, match="has no MI300X; it has H200"):
        profile().costs("MI300X", Point(1, 1, 128))


def test_a_point_between_two_is_taken_where_the_profile_says_so() -> None:
    between = profile("micro_batch").costs("H200", Point(1, 2, 128))
    assert between.layer == PassTimes(2.0, 4.0)
    assert between.layer_activation_bytes == pytest.approx(2e6)
    for beyond in (Point(1, 8, 128), Point(2, 2, 128), Point(1, 2, 128, "full")):
        with pytest.raises(ProfileError, match="lets micro_batch be interpolated"):
            profile("micro_batch").costs("H200", beyond)


def test_the_optimizer_takes_a_fixed_part_and_one_for_each_parameter() -> None:
    assert profile().optimizer_seconds("H200", 1e9) == pytest.approx(1.001)
    assert profile().reduction_seconds("H200", 1e9) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON; name a file that tools/profile_layers.py wrote"),
        ("{}", "not a profile of format 1"),
        ('{"format": 1}', "is damaged: it lists no accelerators"),
        ('{"format": 1, "accelerators": {"X": {"points": []}}}', "X is damaged: TypeError"),
        ('{"format": 1, "accelerators": {"X": []}}', "'points' and 'interpolate' must be lists"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "profile.json"
    file.write_text(text)
    with pytest.raises(ProfileError, match=said):
        load_profile(file)


def test_a_point_of_no_size_is_told(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    points = {Point("two", 0, 128): costs(1.0)}  # type: ignore[arg-type]
    file.write_text(
        json.dumps(MeasuredProfile({"H200": AcceleratorProfile(points, 1e-9)}).to_mapping())
    )
    with pytest.raises(ProfileError) as caught:
        load_profile(file)
    assert [said.partition("point 0: ")[2] for said in caught.value.sentences] == [
        "tensor is 'two'; it must be a whole number of at least 1",
        "micro_batch is 0; it must be a whole number of at least 1",
    ]


def test_every_damage_of_a_file_is_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    points = {Point(1, size, 8): costs(seconds) for size, seconds in ((1, -1.0), (2, 1.0))}
    damaged = AcceleratorProfile(points, -1e-9, interpolate=("layers",))
    file.write_text(
        json.dumps(
            MeasuredProfile({"H200": damaged, "L40S": replace(damaged, points={})}).to_mapping()
        )
    )
    with pytest.raises(ProfileError) as caught:
        load_profile(file)
    expected = [
        "H200: point 0, tensor size 1, micro-batch 1, .*: -1.0 is no cost; a cost is at least 0",
        "H200: its update: -1e-09 is no cost",
        "H200 interpolates 'layers'",
        "L40S: its update",
        "L40S interpolates 'layers'",
        "L40S has no point",
    ]
    told = caught.value.sentences
    assert all(re.search(said, one) for said, one in zip(expected, told, strict=True)), told
