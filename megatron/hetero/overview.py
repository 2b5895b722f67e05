"""The overview printed at the start of a run, its memory lines, and the --hetero-report file."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hetero.device.choose_device import sharing_warning
from hetero.observe.record import recorder
from hetero.plan import Edge
from hetero.startup.identity import RankIdentity
from hetero.text import counted, size_text
from megatron.hetero import weights
from megatron.hetero.checkpoint.save_timing import SaveTimings
from megatron.hetero.console import Console, format_table
from megatron.hetero.fp8_operands import ROWWISE
from megatron.hetero.goodput import Goodput
from megatron.hetero.job import Job
from megatron.hetero.metrics import (
    DataWaitTimes,
    device_used_bytes,
    measured_peak_bytes,
    planned_state_bytes,
)
from megatron.hetero.model import StageModel

_MOST_LAST_INCIDENTS = 64
"""Of each rank, gathered for the report: those before have come with heartbeats."""
# Appended to a stage's transformer_impl where TransformerEngine was asked for but is missing.
FALLBACK = " (TransformerEngine is not installed)"


@dataclass(frozen=True)
class RunResult:
    """One rank's end of a run, for --hetero-report."""

    model: StageModel
    iteration: int
    """The number of the last iteration."""
    consumed_samples: int
    skipped: int
    """Iterations whose update was skipped."""
    last_loss: float | None
    """None if this launch had no iterations."""
    data_wait_times: DataWaitTimes
    save_timings: SaveTimings
    goodput: Goodput


def _all_gather(value: Any) -> list[Any]:
    """All-gather a Python object over the default group's gloo backend; by rank. Collective."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def _edge_transport(job: Job, edge: Edge, transports: dict[int, str]) -> str:
    if job.links is None:
        return f"{job.vendor_backend} (megatron-core)"
    return transports[edge.source]


def stage_rows(job: Job, model: StageModel) -> list[dict[str, Any]]:
    """One row per stage and mesh: ranks, contents, transport to the next stage. Collective."""
    plan = job.plan
    of_experts = sum(p.numel() for n, p in model.named_parameters() if weights.is_of_expert(n))
    parameters = sum(p.numel() for _, p in model.named_parameters()) - of_experts
    counts = _all_gather((parameters, of_experts))
    # `job.args` are those of this rank's mesh.
    stage = job.coordinate.stage
    copies = len(plan.shares(stage)) * plan.meshes[job.coordinate.mesh].context
    own = planned_state_bytes(parameters, args=job.args, copies=copies)
    own += planned_state_bytes(of_experts, args=job.args, copies=plan.expert_copies(stage))
    states = _all_gather(own)
    lacks = job.args.lacks_transformer_engine
    built = _all_gather(f"{job.args.transformer_impl}{FALLBACK if lacks else ''}")
    in_fp8 = _all_gather(model.fp8.describe())
    edges = {edge.source: edge for edge in plan.edges()}
    downstream = job.links.downstream if job.links is not None else None
    opened = _all_gather(downstream.transport if downstream is not None else "")
    transports = {s: opened[plan.blocks_of_stage(s)[0].ranks.start] for s in edges}
    rows = []
    for block in plan.blocks:
        stage, ranks, mesh = block.stage, block.ranks, plan.meshes[block.mesh]
        first = job.identities[ranks.start]
        edge = edges.get(stage)
        rows.append(
            {
                "stage": stage,
                "vendor": first.vendor,
                "simulated": any(job.identities[r].simulated for r in ranks),
                "device": first.device,
                "hosts": sorted({job.identities[r].host for r in ranks}),
                "ranks": list(ranks),
                "layers": list(plan.layers[stage]),
                "tensor_parallel": mesh.tensor,
                "context_parallel": mesh.context,
                "data_parallel": mesh.data,
                "expert_parallel": mesh.experts,
                "transformer_impl": built[ranks.start],
                "fp8": in_fp8[ranks.start],
                "parameters": sum(counts[r][0] for r in ranks[: mesh.tensor])
                + sum(counts[r][1] for r in ranks[: mesh.ranks_of_experts]),
                "state_bytes_per_rank": states[ranks.start],
                "share": mesh.share,
                "next_stage": edge.target if edge else None,
                "next_is_boundary": bool(edge and edge.is_boundary),
                "next_transport": _edge_transport(job, edge, transports) if edge else None,
            }
        )
    return rows


def stage_table(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The cells of `stage_rows`, below their heads; CP and EP where a mesh has them."""
    every = {
        "TP": "tensor_parallel",
        "CP": "context_parallel",
        "DP": "data_parallel",
        "EP": "expert_parallel",
    }
    sizes = {
        name: key
        for name, key in every.items()
        if name in ("TP", "DP") or any(row[key] > 1 for row in rows)
    }
    table = [["stage", "vendor", "ranks", *sizes, "layers", "parameters", "state/rank", "to next"]]
    for row in rows:
        ranks = row["ranks"]
        to_next = "-"
        if row["next_transport"]:
            mark = " (boundary)" if row["next_is_boundary"] else ""
            to_next = f"{row['next_stage']}: {row['next_transport']}{mark}"
        table.append(
            [
                str(row["stage"]),
                row["vendor"] + (" (simulated)" if row["simulated"] else ""),
                str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}",
                *(str(row[size]) for size in sizes.values()),
                "+".join(map(str, row["layers"])),
                f"{row['parameters']:,}",
                size_text(row["state_bytes_per_rank"]),
                to_next,
            ]
        )
    return table


def print_overview(job: Job, rows: list[dict[str, Any]], console: Console) -> None:
    """Print the table of stages, the link choices and notes about the flags. Collective."""
    choices = [] if job.links is None else [link.choice() for link in job.links.choices()]
    lines = [line for part in _all_gather(choices) for line in part]
    kind = "mixed" if len(job.plan.meshes) > 1 else "homogeneous"
    console.line(f"{kind} run on {counted(job.args.world_size, 'rank')}, {job.device.type}:")
    console.table(format_table(stage_table(rows)))
    if job.plan.whole_replicas:
        console.line(_describe_replicas(job))
    for line in lines:
        console.line(line)
    if job.simulated:
        console.line(
            "vendors are simulated (HETERO_VENDOR): every number of this run is a simulated one"
        )
    ranks_here = [identity.host for identity in job.identities].count(job.identities[job.rank].host)
    if job.device.type == "cuda" and (sharing := sharing_warning(ranks_here)):
        console.line(sharing)
    for taken in job.args.taken_flags:
        console.line(taken)
    without = [row for row in rows if row["transformer_impl"].endswith(FALLBACK)]
    if without:
        stages = ", ".join(f"{row['stage']} ({row['vendor']})" for row in without)
        console.line(
            f"--transformer-impl transformer_engine: it is not installed for pipeline stage "
            f"{stages}; megatron-core's local layers are built there (pip install '.[te]')"
        )
    if any(row["fp8"] for row in rows):
        console.line(_describe_fp8(job, rows))
    for ignored in _ignored_flags(job):
        console.line(f"flag without effect here: {ignored}")


def _describe_fp8(job: Job, rows: list[dict[str, Any]]) -> str:
    """What is computed in fp8, and what is not."""
    args = job.args
    stages = ", ".join(
        f"stage {row['stage']} ({row['vendor']}) {row['fp8'] or 'nothing'}" for row in rows
    )
    rest = ["the output layer"]
    if not args.fp8_wgrad:
        rest.append("weight gradients")
    elif args.num_experts is not None:
        rest.append("weight gradients of experts")
    if args.fp8_recipe == ROWWISE and any(mesh.sequence_parallel for mesh in job.plan.meshes):
        rest.append("what tensor-parallel ranks gather")
    last = f" and {rest.pop()}" if len(rest) > 1 else ""
    return f"fp8 with {args.fp8_recipe} scaling: {stages}; {', '.join(rest)}{last} in bf16"


def _ignored_flags(job: Job) -> list[str]:
    """Rank 0's ignored flags, and those of nodes whose flags differ from rank 0's. Collective."""
    lines: dict[str, None] = {}
    for rank, ignored in enumerate(_all_gather(job.args.ignored_flags)):
        for sentence in ignored:
            if sentence not in lines:
                host = job.identities[rank].host
                lines[sentence if rank == 0 else f"{sentence} (on rank {rank}, {host})"] = None
    return list(lines)


def _describe_replicas(job: Job) -> str:
    """How replicas share the global batch, and their transports across vendors. Collective."""
    mine = [f"{link.transport} {link.detail}".strip() for link in job.groups.data_links()]
    transports = sorted({transport for part in _all_gather(mine) for transport in part})
    plan, args = job.plan, job.args
    rows = args.global_batch_size // (args.micro_batch_size * plan.row(0))
    parts = [
        f"{counted(mesh.data, 'replica')} on {mesh.vendor} with "
        f"{counted(rows * mesh.share, 'micro batch', 'micro batches')}{' each' * (mesh.data > 1)}"
        for mesh in plan.meshes
    ]
    return (
        f"a global batch of {args.global_batch_size}: {', '.join(parts)}; gradients cross vendors "
        f"over {', '.join(transports)}"
    )


def print_peak_memory(job: Job, console: Console, *, iteration: int) -> None:
    """Print peak memory per stage. Collective."""
    when = "the first iteration" if iteration == 1 else f"iteration {iteration}"
    peaks = _by_stage(job, _all_gather(measured_peak_bytes(job.device)))
    console.line(f"peak memory of a rank after {when}: {peaks}")
    if job.args.log_device_memory_used and job.device.type == "cuda":
        used = _by_stage(job, _all_gather(device_used_bytes(job.device)))
        console.line(f"memory in use on a device after {when}, as its driver counts it: {used}")


def _by_stage(job: Job, sizes: list[int]) -> str:
    """The maximum over the ranks of each stage and mesh, as text."""
    plan = job.plan
    texts = []
    for block in plan.blocks:
        vendor = f" of {plan.meshes[block.mesh].vendor}" if plan.whole_replicas else ""
        most = max(sizes[rank] for rank in block.ranks)
        texts.append(f"stage {block.stage}{vendor} {size_text(most)}")
    return ", ".join(texts)


def _link_entries(job: Job) -> list[dict[str, Any]]:
    """The report's entries of this rank's links."""
    stage = job.coordinate.stage
    by_side = {"data": job.groups.data_links()} | (job.links.by_side() if job.links else {})
    return [
        {
            "rank": job.rank,
            "peer": link.description.peer,
            "stage": stage,
            "peer_stage": stage if side == "data" else link.description.peer_stage,
            "side": side,
            "is_boundary": side == "data" or link.description.is_boundary,
            "transport": link.transport,
            **asdict(link.counters),
        }
        for side, links in by_side.items()
        for link in links
    ]


def _reported_transport(job: Job, links: list[dict[str, Any]]) -> str:
    """The transports of boundary links; the vendor's backend if there are none."""
    crossing = sorted({entry["transport"] for entry in links if entry["is_boundary"]})
    return ", ".join(crossing) or job.vendor_backend


def write_report(job: Job, result: RunResult, rows: list[dict[str, Any]], console: Console) -> None:
    """Write --hetero-report, a JSON file with the run's setup and results. Collective.

    Ranks named in `job.outputs` write it. A file that cannot be written is a warning, not an error.

    `weights.sha256` covers every parameter by its global name, so that runs with different pipeline
    layouts can be compared bit for bit. `rows` are those of `stage_rows`.
    """
    own = [
        (name, tensor)
        for name, tensor in result.model.named_weights()
        # The second copy of an embedding is not a parameter of the whole model.
        if weights.holds_first_copy(job.coordinate, name) and name != result.model.tied_copy
    ]
    local = weights.digest(own, result.model.tensor_rank)
    sums: dict[str, str] = {}
    for part in _all_gather(local):
        sums |= part
    links = [entry for part in _all_gather(_link_entries(job)) for entry in part]
    incidents = _all_incidents(job)
    costs = _all_gather(
        {
            "peak_memory_bytes": measured_peak_bytes(job.device),
            "fp8_products": result.model.fp8.products(),
            "data_wait": result.data_wait_times.as_json(),
            **result.save_timings.as_json(),
        }
    )
    if "hetero_report" not in job.outputs.written:
        return
    report = {
        "simulated": job.simulated,
        "device": job.device.type,
        "plan": job.plan.to_mapping(),
        "stages": rows,
        "ranks": [_rank_entry(job, identity) | costs[identity.rank] for identity in job.identities],
        "links": links,
        "transport": _reported_transport(job, links),
        "boundary_bytes": sum(e["bytes_sent"] for e in links if e["is_boundary"]),
        "iterations": result.iteration,
        "consumed_samples": result.consumed_samples,
        "skipped_iterations": result.skipped,
        "final_loss": result.last_loss,
        "ended": None,
        "goodput": result.goodput.as_json(),
        "incidents": incidents,
        "weights": {"sha256": weights.combine_digests(sums), "parameters": sums},
        "torch": str(torch.__version__),
    }
    try:
        _write(Path(job.args.hetero_report), report)
    except OSError as error:
        console.warning(
            f"warning: --hetero-report {job.args.hetero_report} could not be written "
            f"({error.strerror}); the run itself ended well"
        )


def write_failed_report(job: Job, cause: str) -> None:
    """Write --hetero-report for a run that has failed: its setup, `cause` and the incidents.

    Rank 0 alone writes it, if it writes the report. Not collective; never raises.
    """
    if job.rank != 0 or "hetero_report" not in job.outputs.written:
        return
    report = {
        "simulated": job.simulated,
        "device": job.device.type,
        "plan": job.plan.to_mapping(),
        "ranks": [_rank_entry(job, identity) for identity in job.identities],
        "iterations": recorder().iteration,
        "ended": cause,
        "incidents": _known_incidents(job),
        "torch": str(torch.__version__),
    }
    with contextlib.suppress(Exception):  # the failure itself is told in any case
        _write(Path(job.args.hetero_report), report)


def _write(target: Path, report: dict[str, Any]) -> None:
    """Raises OSError."""
    temporary = target.with_name(target.name + f".{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(report, indent=1))
        temporary.rename(target)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _rank_entry(job: Job, identity: RankIdentity) -> dict[str, Any]:
    return {
        **{k: v for k, v in asdict(identity).items() if k not in ("flags", "typed")},
        "simulated": identity.simulated,
        "stage": job.plan.coordinate(identity.rank).stage,
    }


def _all_incidents(job: Job) -> list[Mapping[str, Any]]:
    """Those of all ranks, also what no heartbeat has brought to rank 0 yet. Collective."""
    for incidents in _all_gather(recorder().incidents(most=_MOST_LAST_INCIDENTS)):
        if job.collector is not None:
            job.collector.add_incidents(incidents)
    return _known_incidents(job)


def _known_incidents(job: Job) -> list[Mapping[str, Any]]:
    """In the order of their times, by the clock of each rank."""
    known = recorder().incidents() if job.collector is None else job.collector.incidents()
    return sorted(known, key=lambda incident: incident["time"])
