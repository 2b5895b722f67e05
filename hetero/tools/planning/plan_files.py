"""Writes a Solution: plan.yaml and flags.yaml for pretrain_gpt.py, the command for each node,
report.html and trace.json."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from hetero.plan.plan import NO_FP8
from hetero.planner.cluster_shape import Cluster, NodeKind
from hetero.planner.placement import Placement
from hetero.planner.schedule_timeline import chrome_trace
from hetero.planner.solution import Solution
from hetero.presets import model_file
from hetero.text import seconds_text, spans
from hetero.tools.planning.plan_page import render_solution
from hetero.tools.planning.planning_request import PlanningRequest
from hetero.tools.planning.training_check import require_accepted
from hetero.tools.planning.what_if import Sweep
from hetero.tools.reports.page import write_all
from hetero.tools.tool_command_line import make_results_folder


def write_solution(
    folder: Path,
    request: PlanningRequest,
    found: Solution,
    sweeps: Sequence[Sweep],
    *,
    command: Sequence[str],
) -> list[str]:
    """Write all files. Returns lines that say what was written and how to run it.

    Raises UserError, and writes nothing, where the model's own flags do not go with the plan.
    """
    first = found.best.first
    placement = first.placement
    contents = {
        "flags.yaml": _yaml(
            _taken_back(request)
            | training_flags(placement, folder / "plan.yaml")
            | _model_flags(request)
            | _fp8_flags(request, placement),
            _comment(request, found),
        ),
        "report.html": render_solution(request, found, sweeps, command=command),
        "trace.json": json.dumps(chrome_trace(first.costs, first.prediction)) + "\n",
    }
    if not placement.plan.whole_replicas:
        contents["plan.yaml"] = _yaml(placement.plan.to_mapping(), _comment(request, found))
    read_by_training = {name: text for name, text in contents.items() if name in _FOR_TRAINING}
    require_accepted(
        request.model_name,
        read_by_training,
        ranks=placement.plan.world_size,
        model_yaml=request.model_yaml,
    )
    if request.model_yaml is not None:
        contents["model.yaml"] = request.model_yaml
    commands = node_commands(placement, request, folder)
    contents["commands.txt"] = "\n".join([*commands, ""])
    make_results_folder(str(folder))
    write_all({folder / name: text for name, text in contents.items()})
    if placement.plan.whole_replicas:
        # One of an earlier answer would be taken for this one's.
        (folder / "plan.yaml").unlink(missing_ok=True)
    return [
        f"wrote {', '.join(str(folder / name) for name in sorted(contents))}",
        "",
        f"the command for each node, also in {folder / 'commands.txt'}:",
        *commands,
    ]


@dataclass(frozen=True)
class _Start:
    """Ranks that one launcher starts."""

    kind: NodeKind
    node: int
    """Of its kind."""
    first_gpu: int
    ranks: range


def node_commands(placement: Placement, request: PlanningRequest, folder: Path) -> list[str]:
    """The command for each node, in the order of the ranks. `folder` has the written files."""
    starts = _starts(placement, request.problem.cluster)
    first = starts[0]
    master = first.kind.addresses[first.node] if first.kind.addresses else "$HOST"
    model = folder / "model.yaml"
    if request.model_yaml is None:
        model = Path(_short(model_file(request.model_name)))
    lines = [f"# every node needs {folder}, at the same path"]
    if master == "$HOST":
        lines.append(f"# HOST is the address of node 0, the first node of {first.kind.name}")
    for number, start in enumerate(starts):
        kind, count = start.kind, len(start.ranks)
        where = f" at {kind.addresses[start.node]}" if kind.addresses else ""
        lines.append(
            f"# node {number}: {kind.name} {start.node + 1} of {kind.nodes}{where}, "
            f"{spans(start.ranks)}"
        )
        gpus = ",".join(str(start.first_gpu + index) for index in range(count))
        lines.append(
            (f"CUDA_VISIBLE_DEVICES={gpus} " if start.first_gpu else "")
            + f"hetero pretrain --nnodes {len(starts)} --node-rank {number} "
            f"--nproc-per-node {count} --master-addr {master} --master-port 29500 \\"
        )
        files = " ".join(
            f"--yaml-cfg {shlex.quote(str(f))}" for f in (model, folder / "flags.yaml")
        )
        lines.append(f"    {files} <lr, iterations, data>")
    return lines


def _starts(placement: Placement, cluster: Cluster) -> list[_Start]:
    """The nodes in the order of the ranks. Consecutive meshes of a kind share its nodes.

    A kind that comes again goes on where it stopped, maybe on a node that is used in part.
    """
    starts: list[_Start] = []
    used: dict[str, int] = {}
    rank = 0
    for name, mesh in zip(placement.kinds, placement.plan.meshes, strict=True):
        kind, end = cluster.kind(name), rank + mesh.world_size
        while rank < end:
            node, gpu = divmod(used.get(name, 0), kind.gpus_per_node)
            count = min(end - rank, kind.gpus_per_node - gpu)
            last = starts[-1] if starts else None
            if last is not None and last.kind is kind and last.node == node:
                starts[-1] = replace(last, ranks=range(last.ranks.start, rank + count))
            else:
                starts.append(_Start(kind, node, gpu, range(rank, rank + count)))
            used[name] = used.get(name, 0) + count
            rank += count
    return starts


def training_flags(placement: Placement, plan_file: Path) -> dict[str, Any]:
    """What pretrain_gpt.py has to be told beside the model, its data and the plan."""
    plan = placement.plan
    first = plan.meshes[0]
    flags: dict[str, Any] = {"global-batch-size": placement.global_batch}
    flags["micro-batch-size"] = first.micro_batch_size
    if plan.chunks > 1:
        flags["num-virtual-stages-per-pipeline-rank"] = plan.chunks
    if first.distributed_optimizer:
        flags["use-distributed-optimizer"] = True
    if not plan.whole_replicas:
        return {"hetero-pipeline": True, "hetero-plan": os.path.realpath(plan_file), **flags}
    flags["hetero-data-parallel"] = ",".join(f"{m.vendor}:{m.data}" for m in plan.meshes)
    flags["hetero-data-shares"] = ",".join(str(mesh.share) for mesh in plan.meshes)
    flags["tensor-model-parallel-size"] = first.tensor
    if first.context > 1:
        flags["context-parallel-size"] = first.context
    if first.experts > 1:
        flags["expert-model-parallel-size"] = first.experts
        flags["expert-tensor-parallel-size"] = first.ranks_per_expert
    flags["pipeline-model-parallel-size"] = plan.stages
    if first.sequence_parallel:
        flags["sequence-parallel"] = True
    if len({sum(chunks) for chunks in plan.layers}) > 1:
        parts = ["t" * sum(chunks) for chunks in plan.layers]
        flags["pipeline-model-parallel-layout"] = "E" + "|".join(parts) + "L"
    if first.recompute != "none":
        flags["recompute-granularity"] = first.recompute
    if first.recompute == "full":
        flags |= {"recompute-method": "uniform", "recompute-num-layers": 1}
    return flags


def _short(path: Path) -> str:
    """A path as it is typed in the folder that holds it."""
    own = Path.cwd()
    return str(path.relative_to(own)) if path.is_relative_to(own) else str(path)


_FOR_TRAINING = ("flags.yaml", "plan.yaml")
_LAYOUT_FLAGS = (
    "tensor-model-parallel-size",
    "context-parallel-size",
    "expert-model-parallel-size",
    "expert-tensor-parallel-size",
    "hierarchical-context-parallel-sizes",
    "pipeline-model-parallel-size",
    "sequence-parallel",
    "use-distributed-optimizer",
    "num-layers-per-virtual-pipeline-stage",
    "num-virtual-stages-per-pipeline-rank",
    "microbatch-group-size-per-virtual-pipeline-stage",
    "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers",
    "pipeline-model-parallel-layout",
    "account-for-embedding-in-pipeline-split",
    "account-for-loss-in-pipeline-split",
    "recompute-activations",
    "recompute-granularity",
    "recompute-method",
    "recompute-num-layers",
    "distribute-saved-activations",
    "hetero-pipeline",
    "hetero-plan",
    "hetero-vendors",
    "hetero-pipeline-sizes",
    "hetero-pipeline-layers",
    "hetero-tensor-sizes",
    "hetero-context-sizes",
    "hetero-expert-sizes",
    "hetero-data-sizes",
    "hetero-micro-batch-sizes",
    "hetero-recompute",
    "hetero-data-parallel",
    "hetero-data-shares",
)
"""What a plan decides."""


def _taken_back(request: PlanningRequest) -> dict[str, None]:
    """The layout that the model's own file gives: it would contradict the plan, or change it."""
    return dict.fromkeys(flag for flag in _LAYOUT_FLAGS if flag in request.model_flags)


def _model_flags(request: PlanningRequest) -> dict[str, Any]:
    """What was asked for on the command line, and the model's own flags may say otherwise."""
    precision = {} if request.dtype == "fp32" else {request.dtype: True}
    return {"seq-length": request.problem.model.seq_length, **precision}


def _fp8_flags(request: PlanningRequest, placement: Placement) -> dict[str, Any]:
    """Of the run; a mesh of the plan file may say `none`."""
    fp8 = request.problem.options.fp8
    if not fp8.is_used:
        return {}
    if all(mesh.fp8 == NO_FP8 for mesh in placement.plan.meshes):
        return dict.fromkeys(request.model_flags & {"fp8-format"})
    return {"fp8-format": fp8.format, "fp8-recipe": fp8.recipe}


def _comment(request: PlanningRequest, found: Solution) -> str:
    first = found.best.first.prediction
    name = " ".join(request.model_name.split())  # a path may have lines
    return (
        f"# By hetero plan for {name}, global batch "
        f"{request.problem.space.global_batch}: predicted {seconds_text(first.seconds)} a step, "
        f"{first.tokens_per_second:,.0f} tokens/s\n"
    )


def _yaml(data: dict[str, Any], comment: str) -> str:
    # Lists of numbers on one line, everything else on lines of its own.
    flow = None if "meshes" in data else False
    return comment + yaml.safe_dump(data, sort_keys=False, default_flow_style=flow, width=100)
