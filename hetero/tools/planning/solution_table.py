"""A Solution as text for the terminal, and as table rows for the page."""

from __future__ import annotations

from hetero.plan import Mesh
from hetero.plan.plan import NO_FP8
from hetero.planner.bottleneck import explain_bottleneck
from hetero.planner.solution import SimulatedPlan, Solution
from hetero.text import counted, seconds_text
from hetero.tools.planning.planning_request import PlanningRequest
from hetero.tools.reports.text_table import aligned

MESH_HEAD = (
    *("nodes", "stages", "layers", "TP", "CP", "DP", "EP", "micro-batch", "recompute"),
    *("fp8", "share"),
)
PLAN_HEAD = ("plan", "step", "tokens/s", "")


def solution_text(request: PlanningRequest, found: Solution) -> str:
    first = found.best.first
    rows = [list(MESH_HEAD), *mesh_rows(first, request.problem.options.fp8.format)]
    runners = [list(PLAN_HEAD), *plan_rows(found)]
    return "\n".join(
        [
            headline(request, found),
            "",
            *aligned(rows, text={0, 2, 6, 8, 9}),
            "",
            *explain_bottleneck(request.problem, first),
            "",
            *comparison_lines(found),
            "",
            *aligned(runners, text={0}),
            "",
            *(f"costs of {line}" for line in request.sources),
            search_sentence(found),
        ]
    )


def headline(request: PlanningRequest, found: Solution) -> str:
    first = found.best.first.prediction
    tokens = f"{first.tokens_per_second:,.0f} tokens/s"
    return f"{request.model_name}: {seconds_text(first.seconds)} a step, {tokens} (predicted)"


def mesh_rows(planned: SimulatedPlan, fp8: str) -> list[list[str]]:
    """`fp8` is the format of meshes that say none."""
    plan = planned.placement.plan
    rows, stage = [], 0
    for kind, mesh in zip(planned.placement.kinds, plan.meshes, strict=True):
        first = 0 if plan.whole_replicas else stage
        counts = [sum(chunks) for chunks in plan.layers[first : first + mesh.stages]]
        stage += mesh.stages
        rows.append(
            [
                kind,
                str(mesh.stages),
                run_lengths(counts),
                str(mesh.tensor),
                str(mesh.context),
                str(mesh.data),
                _experts_text(mesh),
                str(mesh.micro_batch_size),
                str(mesh.recompute),
                (mesh.fp8 or fp8) if fp8 != NO_FP8 else "",
                str(mesh.share) if plan.whole_replicas else "",
            ]
        )
    return rows


def _experts_text(mesh: Mesh) -> str:
    if mesh.expert_tensor is None:
        return str(mesh.experts)
    return f"{mesh.experts}, ETP {mesh.expert_tensor}"


def run_lengths(counts: list[int]) -> str:
    """`4 x 12, 11`: equal neighbours together."""
    parts: list[tuple[int, int]] = []
    for count in counts:
        if parts and parts[-1][1] == count:
            parts[-1] = (parts[-1][0] + 1, count)
        else:
            parts.append((1, count))
    return ", ".join(f"{times} x {count}" if times > 1 else str(count) for times, count in parts)


def one_line(planned: SimulatedPlan) -> str:
    plan = planned.placement.plan
    across = " | ".join(
        f"{kind} {mesh.stages} x TP {mesh.tensor}"
        + (f" x CP {mesh.context}" if mesh.context > 1 else "")
        + f" x DP {mesh.data}"
        + (f", EP {_experts_text(mesh)}" if mesh.experts > 1 else "")
        + (f" x share {mesh.share}" if plan.whole_replicas else "")
        + f", micro-batch {mesh.micro_batch_size}"
        + (f", recompute {mesh.recompute}" if mesh.recompute != "none" else "")
        + (f", fp8 {mesh.fp8}" if mesh.fp8 is not None else "")
        for kind, mesh in zip(planned.placement.kinds, plan.meshes, strict=True)
    )
    chunks = f", {plan.chunks} chunks a stage" if plan.chunks > 1 else ""
    return ("replicas: " if plan.whole_replicas else "") + across + chunks


def plan_rows(found: Solution) -> list[list[str]]:
    best = found.best.first.seconds
    return [
        [
            one_line(planned),
            seconds_text(planned.seconds),
            f"{planned.prediction.tokens_per_second:,.0f}",
            f"{planned.seconds / best - 1:+.1%}" if planned is not found.best.first else "",
        ]
        for planned in found.best.plans
    ]


def comparison_lines(found: Solution) -> list[str]:
    lines = []
    for alone in found.vendor_baselines:
        reached = f"{alone.tokens_per_second:,.0f} tokens/s"
        fits = alone.tokens_per_second
        lines.append(f"{alone.vendor} alone: {reached if fits else 'does not fit in memory'}")
    if found.speedup_over_best_vendor:
        lines.append(f"Together: {found.speedup_over_best_vendor:.2f} times the best vendor alone.")
    if found.fraction_of_vendor_sum:
        lines.append(
            f"Together: {found.fraction_of_vendor_sum:.1%} of the sum of all vendors alone."
        )
    for name, tokens in found.one_more_node:
        gain = tokens / found.tokens_per_second - 1
        lines.append(f"Another node of {name}: {gain:+.1%} tokens/s.")
    return lines


def search_sentence(found: Solution) -> str:
    count = found.best.search_result.combinations
    proof = (
        "none is estimated shorter"
        if found.best.search_result.is_exact
        else "the most promising seen"
    )
    return f"{counted(count, 'combination')} of meshes; {proof}"
