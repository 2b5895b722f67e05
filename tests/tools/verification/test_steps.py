"""From what the nodes say to a verdict: every fault is named, with what to do."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hetero.tools.preflight_checks.network import Call
from hetero.tools.verification.steps import (
    judge_links,
    judge_nodes,
    judge_operators,
    judge_speed,
    reached_nics,
)
from hetero.tools.verification.training_steps import (
    judge_checkpoints,
    judge_faults,
    judge_training,
)
from hetero.tools.verification.verdict import Verdict
from tests.tools.verification.jobs import facts, job

READY: dict[str, Any] = {"ready": True, "nodes": [], "advice": [], "calls": []}


def the_failure(verdict: Verdict) -> tuple[str, str, str]:
    (failure,) = verdict.failures
    assert not verdict.passed
    assert failure.seen.startswith(verdict.summary)
    return failure.expected, failure.seen, failure.remedy


def call(source: int, target: int, nics: str, error: str = "") -> dict[str, Any]:
    return asdict(Call(source, target, *nics.split("-"), error, None, 0.0))


def test_nodes_of_two_vendors_that_are_ready_pass(tmp_path: Path) -> None:
    verdict = judge_nodes(job(tmp_path), [{"report": READY}, {}])
    assert verdict.passed
    assert "simulated: node 0 is cpu and plays amd" in verdict.notes


def test_a_warning_about_a_rail_fails_and_one_about_speed_does_not(tmp_path: Path) -> None:
    text = "node 0 (a) cannot reach node 1 (b) over x - y; see the routes"
    advice = [
        {"severity": "warning", "subject": "network", "text": text},
        {"severity": "warning", "subject": "CPU", "text": "slow; set another governor"},
    ]
    said = [{"report": READY | {"advice": advice}}, {}]
    expected, seen, remedy = the_failure(judge_nodes(job(tmp_path), said))
    assert "each NIC of a node reaches its counterpart" in expected
    assert seen == "node 0 (a) cannot reach node 1 (b) over x - y"
    assert remedy == "see the routes"


def test_nodes_of_one_vendor_are_named(tmp_path: Path) -> None:
    same = job(tmp_path, facts(0, actual_vendor="amd"), facts(1, vendors=("amd",)))
    _, seen, remedy = the_failure(judge_nodes(same, [{"report": READY}, {}]))
    assert "node 0 (gpu-host-0.example.org): amd; node 1" in seen
    assert "HETERO_VENDOR=nvidia" in remedy


def test_a_node_of_another_vendor_than_it_was_said_to_be_is_named(tmp_path: Path) -> None:
    gpu = {"actual_vendor": "nvidia", "gpus": ("H200",), "vendors": ("amd",)}
    other = facts(1, actual_vendor="nvidia", gpus=("H200",))
    wrong = job(tmp_path, facts(0, **gpu), other, vendors=("amd", "nvidia"))
    expected, seen, remedy = the_failure(judge_nodes(wrong, [{"report": READY}, {}]))
    assert expected == "node 0 is amd, as --vendors says"
    assert "is nvidia (H200), and HETERO_VENDOR has it play amd" in seen
    assert "unset HETERO_VENDOR" in remedy


def test_a_node_without_a_gpu_is_named(tmp_path: Path) -> None:
    lacking = job(tmp_path, facts(0), facts(1, vendors=("cpu",)))
    _, seen, _ = the_failure(judge_nodes(lacking, [{"report": READY}, {}]))
    assert seen == "node 1 (gpu-host-1.example.org) has none"


@pytest.mark.parametrize(
    ("broken", "mine"), [("", ("x0", "x1")), ("x1-y1", ()), ("x2-y2", ("x0", "x1"))]
)
def test_links_take_the_nics_of_rails_that_work_both_ways(
    tmp_path: Path, broken: str, mine: tuple[str, ...]
) -> None:
    rails = ["x0-y0", "x1-y1", *(["x2-y2"] if broken == "x2-y2" else [])]
    calls = [call(0, 1, rail, "timed out" if rail == broken else "") for rail in rails]
    calls += [call(1, 0, "-".join(reversed(rail.split("-")))) for rail in rails]
    assert reached_nics(job(tmp_path), [{"report": READY | {"calls": calls}}, {}]) == mine


def links(**changed: Any) -> list[dict[str, Any]]:
    found = {"absent": {}, "clauses": [["tcp, CPU tensors", "every dtype", 0, []]]}
    return [{"found": [found | changed]}, {"found": []}]


def test_a_broken_clause_is_named_with_its_direction(tmp_path: Path) -> None:
    clauses = [["tcp, CPU tensors", "every dtype", 1, ["torch.int8 arrived changed"]]]
    expected, seen, _ = the_failure(judge_links(job(tmp_path), links(clauses=clauses)))
    assert "from nvidia (rank 1 on node 1) to amd (rank 0 on node 0)" in expected
    assert seen == "torch.int8 arrived changed"


def test_rdma_devices_without_a_library_are_a_failure_and_no_devices_are_none(
    tmp_path: Path,
) -> None:
    absent = {"verbs, CPU tensors": "b cannot use libibverbs (no such file); install it (Debian)"}
    assert judge_links(job(tmp_path), links(absent=absent)).passed
    with_nics = job(tmp_path, facts(0, rdma=("mlx5_0",)), facts(1, rdma=("mlx5_0",)))
    _, seen, remedy = the_failure(judge_links(with_nics, links(absent=absent)))
    assert "cannot use libibverbs" in seen
    assert remedy == "install it (Debian)"


def speed(**changed: Any) -> list[dict[str, Any]]:
    reached = {"gb_s": 2.0, "latency_us": 30.0, "both_gb_s": 3.0, "transport": "tcp"}
    record = {"failed": [], "notes": [], "points": []}
    paths = {"tcp": reached | {"limit": "bare TCP", "share": 0.9} | changed}
    return [{"found": [{"paths": paths, "limits": {}, "failed": {}, "collectives": record}]}]


def test_a_path_far_below_its_bare_path_fails(tmp_path: Path) -> None:
    assert judge_speed(job(tmp_path), speed()).passed
    expected, seen, _ = the_failure(judge_speed(job(tmp_path), speed(share=0.1)))
    assert "tcp at 25% of bare TCP" in expected
    assert seen == "10%: 2.00 GB/s"


def test_a_wrong_operator_is_named_with_its_vendor(tmp_path: Path) -> None:
    def payload(vendor: str, *, right: bool) -> dict[str, Any]:
        operators = {"layers.0.linear_fc1": right, "cross_entropy": True}
        found = {"operators": operators, "verdict": "The first ... linear_fc1", "worst": 0.4}
        return {"found": {vendor: {"bf16": found}}}

    said = [payload("amd", right=False), payload("nvidia", right=True)]
    verdict = judge_operators(job(tmp_path), said)
    _, seen, remedy = the_failure(verdict)
    assert seen.startswith("node 0 (gpu-host-0.example.org, amd), bf16: The first")
    assert "compare_ops.py" in remedy
    assert verdict.results["amd, bf16: layers.0.linear_fc1"] == "beyond rounding"
    assert verdict.results["nvidia, bf16: layers.0.linear_fc1"] == "within rounding"


def training(losses: list[float], weights: str = "w") -> dict[str, Any]:
    rows = [
        {"iteration": n, "loss": loss, "grad_norm": loss / 2, "learning_rate": 0.1}
        | {"weight_decay": 0.1, "batch_size": 8, "consumed_tokens": n * 512}
        for n, loss in enumerate(losses, start=1)
    ]
    return {"iterations": rows, "weights": weights}


LOSSES = [6.0 - 0.1 * n for n in range(10)]
REAL = (facts(0, actual_vendor="amd"), facts(1, actual_vendor="nvidia"))


@pytest.mark.parametrize(
    ("factor", "real", "passed", "word"),
    [
        (1.0, False, True, "the same bits"),
        (1 + 1e-6, False, False, "within the bounds"),
        (1 + 1e-6, True, True, "within the bounds"),
        (1.02, True, False, "differ"),
    ],
)
def test_simulated_runs_have_the_same_bits_and_two_vendors_differ_like_rounding(
    tmp_path: Path, factor: float, real: bool, passed: bool, word: str
) -> None:
    there = job(tmp_path, *REAL) if real else job(tmp_path)
    own, other = training(LOSSES), training([loss * factor for loss in LOSSES], "w" * 2)
    said = [{"alone": {"amd": own}, "mixed": own}, {"alone": {"nvidia": other}, "mixed": None}]
    if factor == 1.0:
        said[1]["alone"] = {"nvidia": own}
    verdict = judge_training(there, said)
    assert verdict.passed is passed
    assert verdict.results["mixed and nvidia alone"] == word


RAILS = [
    {"end": end, "rails": 2, "changed": 0, "lost": ["rail 1 is lost"], "seconds": 0.1}
    for end in (0, 1)
]
KILLED = {"code": 137, "seconds": 3.0, "named": ["rank 1 on gpu-host-1 ..."], "errors": []}


@pytest.mark.parametrize(
    ("rail", "killed", "said"),
    [
        ({"lost": []}, {}, "0 rails named"),
        ({"changed": 3}, {}, "messages changed"),
        ({"seconds": 99.0}, {}, "named too late"),
        ({}, {"named": []}, "another or no rank and host named"),
        ({}, {"seconds": 99.0}, "ended too late"),
        ({}, {"seconds": None}, "the run ended before a rank was killed"),
    ],
)
def test_a_fault_that_is_not_named_in_time_is_a_failure(
    tmp_path: Path, rail: dict[str, Any], killed: dict[str, Any], said: str
) -> None:
    right = [{"rails": RAILS, "killed": KILLED}, {"rails": [], "killed": KILLED}]
    assert judge_faults(job(tmp_path), right).passed
    wrong = [
        {"rails": [RAILS[0], RAILS[1] | rail], "killed": KILLED},
        {"rails": [], "killed": KILLED | killed},
    ]
    _, seen, _ = the_failure(judge_faults(job(tmp_path), wrong))
    assert seen.startswith(said)


def test_a_tensor_that_changes_between_vendors_is_named(tmp_path: Path) -> None:
    read = {"of": "nvidia", "weights": "w", "compared": 9, "differ": []}
    mixed = read | {"of": "amd"}
    said = [{"alone": {"amd": read}, "mixed": mixed}, {"alone": {"nvidia": mixed}, "mixed": None}]
    assert judge_checkpoints(job(tmp_path), said).passed
    said[0]["alone"] = {"amd": read | {"differ": ["embedding.weight"]}}
    expected, seen, _ = the_failure(judge_checkpoints(job(tmp_path), said))
    assert "amd reads what nvidia wrote" in expected
    assert "1 tensor of 9 differ: embedding.weight" in seen
