"""Who takes part: the vendor a rank claims, and the ranks that are refused together."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from hetero.errors import UserError
from hetero.plan import Mesh, Plan
from hetero.startup.identity import (
    RankIdentity,
    _named_vendor,
    check_identities,
    identify,
    running_vendor,
)

HOMOGENEOUS = Plan(meshes=(Mesh("cpu", stages=1, data=4),), layers=((1,),))
MIXED = Plan(
    meshes=(Mesh("amd", stages=1, tensor=2), Mesh("nvidia", stages=1, tensor=2)),
    layers=((1,), (1,)),
)


def _identities(vendors: list[str], **changed: Any) -> list[RankIdentity]:
    one = RankIdentity(
        rank=0,
        local_rank=0,
        host="node",
        vendor="",
        actual_vendor="nvidia",
        device="x86_64 CPU",
        project_version="0.1.0",
        torch_version="2.9.0+cu130",
        core_version="0.16.1",
        flags={"num_layers": 32, "lr": 1e-3, "seed": 1234, "swiglu": False, "derived": 4},
        typed={"num_layers": "--num-layers", "lr": "--lr"},
    )
    return [replace(one, rank=r, local_rank=r, vendor=v, **changed) for r, v in enumerate(vendors)]


def _refusal(identities: list[RankIdentity], plan: Plan) -> str:
    with pytest.raises(UserError) as error:
        check_identities(identities, plan, mixed=len(plan.meshes) > 1)
    sentence = str(error.value)
    assert "\n" not in sentence
    assert error.value.exit_code == 2
    return sentence


# HETERO_VENDOR.


@pytest.mark.parametrize(
    ("value", "vendors"),
    [
        ("amd", ["amd"] * 4),
        ("plan", ["cpu"] * 4),
        ("amd*2,nvidia*2", ["amd", "amd", "nvidia", "nvidia"]),
        ("amd, nvidia*3", ["amd", "nvidia", "nvidia", "nvidia"]),
    ],
)
def test_the_variable_names_one_vendor_or_one_for_each_local_rank(
    value: str, vendors: list[str]
) -> None:
    named = [_named_vendor(value, local_rank=r, planned="cpu") for r in range(4)]
    assert named == vendors


@pytest.mark.parametrize(
    "value",
    [
        "intel",
        "amd*-1",
        "amd;nvidia",
        "amd*",
    ],
)
def test_a_value_that_is_not_understood_is_refused_with_the_right_ones(value: str) -> None:
    with pytest.raises(UserError, match="is not understood") as error:
        _named_vendor(value, local_rank=0, planned="cpu")
    assert repr(value) in str(error.value)
    assert "amd*2,nvidia*2" in str(error.value)


def test_a_list_too_short_for_the_local_ranks_is_refused_with_both_numbers() -> None:
    with pytest.raises(UserError, match="names 2 ranks but local rank 2 was started"):
        _named_vendor("amd,nvidia", local_rank=2, planned="cpu")


def test_an_override_is_marked_as_simulated() -> None:
    def claim(value: str, planned: str = "amd") -> tuple[str, bool]:
        environ = {"HETERO_VENDOR": value}
        identity = identify(rank=1, local_rank=1, planned_vendor=planned, flags={}, environ=environ)
        assert identity.torch_version == torch.__version__
        return identity.vendor, identity.simulated

    actual = running_vendor()
    other = "amd" if actual != "amd" else "nvidia"
    assert claim("") == (actual, False)
    assert claim(actual) == (actual, False)
    assert claim(f" {other.upper()} ") == (other, True)
    assert claim("plan", planned=other) == (other, True)
    assert claim("plan", planned=actual) == (actual, False)


def test_the_vendor_is_that_of_the_build_and_of_what_it_can_see(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert running_vendor() == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    assert running_vendor() == "nvidia"
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert running_vendor() == "amd"


# Which ranks can work together.


def test_ranks_that_are_what_the_plan_says_are_accepted() -> None:
    mixed = _identities(["amd", "amd", "nvidia", "nvidia"])
    check_identities(mixed, MIXED, mixed=True)
    check_identities(_identities(["nvidia"] * 4), HOMOGENEOUS, mixed=False)


@pytest.mark.parametrize("version", ["2.9.0+rocm7.1", "2.9.0a0+git1a2b3c4.nv25.8"])
def test_what_follows_the_release_of_a_torch_version_is_the_vendors_own(version: str) -> None:
    identities = _identities(["amd", "amd", "nvidia", "nvidia"])
    identities[:2] = [replace(i, torch_version=version) for i in identities[:2]]
    check_identities(identities, MIXED, mixed=True)


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("project_version", "0.2.0", "versions of this project"),
        ("torch_version", "2.8.0+rocm7.1", "PyTorch releases"),
        ("core_version", "0.17.0", "megatron-core versions"),
    ],
)
def test_different_versions_are_refused_with_both_and_their_ranks(
    field: str, value: str, what: str
) -> None:
    identities = _identities(["amd", "amd", "nvidia", "nvidia"])
    identities[3] = replace(identities[3], host="mi325-7", **{field: value})
    sentence = _refusal(identities, MIXED)
    assert f"different {what}" in sentence
    assert "ranks 0-2 on node: " in sentence
    assert f"rank 3 on mi325-7: {value.split('+')[0]}" in sentence
    assert "; install the same on every node" in sentence


@pytest.mark.parametrize(
    ("flags", "typed", "says"),
    [
        (
            {"num_layers": 30, "derived": 3},
            {},
            "on node was started with --num-layers 32 and rank 2 on mi325-7 with --num-layers 30;",
        ),
        ({"seed": 5}, {"seed": "--seed"}, "without --seed and rank 2 on mi325-7 with --seed 5;"),
        ({"swiglu": True}, {"swiglu": "--swiglu"}, "without --swiglu and rank 2 on mi325-7 with"),
        ({"derived": 3}, {}, "on node has the derived 4 and rank 2 on mi325-7 3;"),
    ],
)
def test_different_flags_are_refused_as_they_were_typed(
    flags: dict[str, Any], typed: dict[str, str], says: str
) -> None:
    identities = _identities(["amd", "amd", "nvidia", "nvidia"])
    for rank in (2, 3):
        identities[rank] = replace(
            identities[rank],
            host="mi325-7",
            flags=identities[rank].flags | flags,
            typed=identities[rank].typed | typed,
        )
    assert says in _refusal(identities, MIXED)


def test_every_difference_is_told_once() -> None:
    identities = _identities(["amd", "amd", "nvidia", "nvidia"])
    for rank in (2, 3):
        changed = {"num_layers": 30, "lr": 1.0}
        identities[rank] = replace(identities[rank], flags=identities[rank].flags | changed)
    with pytest.raises(UserError) as error:
        check_identities(identities, MIXED, mixed=True)
    assert len(error.value.sentences) == 2


def test_different_plans_are_told_by_the_mesh_that_differs() -> None:
    identities = _identities(["amd", "amd", "nvidia", "nvidia"])
    other = Plan(meshes=(MIXED.meshes[0], Mesh("nvidia", stages=1, data=2)), layers=MIXED.layers)
    for rank, plan in enumerate((MIXED, MIXED, MIXED, other)):
        flags = identities[rank].flags | {"plan": plan.to_mapping()}
        identities[rank] = replace(identities[rank], flags=flags)
    sentence = _refusal(identities, MIXED)
    assert "the plan of rank 0 on node has mesh 1 as vendor: nvidia" in sentence
    assert "that of rank 3 on node has mesh 1 as vendor: nvidia" in sentence


def test_a_rank_on_another_vendor_than_planned_is_refused_by_rank_host_and_stage() -> None:
    identities = _identities(["amd", "amd", "nvidia", "nvidia"])
    identities[2] = replace(identities[2], vendor="amd", host="mi325-7")
    sentence = _refusal(identities, MIXED)
    assert "rank 2 on mi325-7 is amd" in sentence
    assert "stage 1 on nvidia" in sentence


def test_a_replica_on_another_vendor_than_planned_is_refused_by_its_number() -> None:
    meshes = tuple(Mesh(vendor, stages=1, data=2) for vendor in ("nvidia", "amd"))
    plan = Plan(meshes=meshes, layers=((1,),), whole_replicas=True)
    sentence = _refusal(_identities(["nvidia"] * 4), plan)
    assert "rank 2 on node is nvidia but the plan puts replica 2 on amd" in sentence


def test_two_vendors_in_a_homogeneous_run_are_refused() -> None:
    sentence = _refusal(_identities(["amd", "nvidia", "amd", "amd"]), HOMOGENEOUS)
    assert "amd and nvidia" in sentence
    assert "--hetero-pipeline" in sentence
