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
    SlowedProfile,
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


def test_a_slowed_accelerator_takes_longer_for_every_pass_and_for_nothing_else() -> None:
    times = PassTimes(1.0, 2.0)
    measured = replace(costs(1.0), sparse_layer=times, experts_at_least=times)
    one = replace(profile().accelerators["H200"], points={Point(1, 1, 128): measured})
    both = MeasuredProfile({"H200": one, "MI300X": one})
    slowed = SlowedProfile(both, frozenset({"MI300X"}), 3.0)
    assert slowed.costs("H200", Point(1, 1, 128)) == measured
    found = slowed.costs("MI300X", Point(1, 1, 128))
    assert found.layer == found.head == found.sparse_layer == PassTimes(3.0, 6.0)
    assert found.experts_at_least == PassTimes(3.0, 6.0)
    assert found.embedding == PassTimes(pytest.approx(0.3), pytest.approx(0.6))
    assert found.layer_activation_bytes == measured.layer_activation_bytes
    assert slowed.optimizer_seconds("MI300X", 1e9) == both.optimizer_seconds("MI300X", 1e9)


def test_the_optimizer_takes_a_fixed_part_and_one_for_each_parameter() -> None:
    assert profile().optimizer_seconds("H200", 1e9) == pytest.approx(1.001)
    assert profile().reduction_seconds("H200", 1e9) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON; name a file that hetero profile-layers wrote"),
        ("{}", "not a profile of format 1"),
        ('{"format": 1}', "is damaged: it lists no accelerators"),
        ('{"format": 1, "accelerators": {"X": {"points": []}}}', "X is damaged: TypeError"),
        ('{"format": 1, "accelerators": {"X": []}}', "'points' and 'interpolate' must be lists"),
        ('{"format": 1, "format": 1}', "the key 'format' stands twice"),
        ("[" * 5000 + "]" * 5000, "not JSON; name a file"),
        ('{"format":' * 5000 + "1" + "}" * 5000, "not JSON; name a file"),
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


@pytest.mark.parametrize(
    ("layer", "kept", "said"),
    [
        ({"forward": 0, "backward": 0}, 1.0, "point 0, tensor size 1, .*: a layer takes no time"),
        ({"forward": 1, "backward": 2}, 10**400, "a whole number of 401 digits is no cost"),
        ({"forward": 1e300, "backward": 2}, 1.0, "1e\\+300 is more than any cost"),
    ],
)
def test_costs_that_nothing_can_be_computed_with_are_refused(
    tmp_path: Path, layer: dict[str, float], kept: float, said: str
) -> None:
    data = profile().to_mapping()
    measured = data["accelerators"]["H200"]["points"][0]["costs"]
    measured |= {"layer": layer, "layer_activation_bytes": kept}
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(data))
    with pytest.raises(ProfileError, match=said):
        load_profile(file)


def test_a_point_that_stands_twice_is_told(tmp_path: Path) -> None:
    data = profile().to_mapping()
    points = data["accelerators"]["H200"]["points"]
    points.append(points[0])
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(data))
    with pytest.raises(ProfileError, match=r"H200 has tensor size 1, .* twice; keep one"):
        load_profile(file)


def test_a_source_can_be_written_again(tmp_path: Path) -> None:
    """JSON can say half a character, with which no page can be written."""
    data = profile().to_mapping()
    data["accelerators"]["H200"]["source"] = "here \ud800"
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(data))
    assert load_profile(file).accelerators["H200"].source == "here ?"


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
