"""Metis' own search (ATC'24), run from a checkout of it, and the plans that it prints."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.planner_validation.peer_plan import PeerPlan, PeerStage, Replica
from bench.planner_validation.peer_problems import PeerProblem, model_of, sailor_name
from hetero.planner.cluster_shape import Cluster

_LOOKED_AT = 500
"""Of the plans that it prints, the best by its own cost."""
_PLAN = re.compile(r"\d+, [\d.]+, \((.*)\), (\[[\d, ]*\]), (\[.*\]), (\d+), (\[[\d, ]+\])")
_BETWEEN_PASSES = 1e-3
"""Milliseconds: a plan with none between its passes is an error to Metis."""


def metis_profiles(problem: PeerProblem, *, metis: Path, sailor: Path, folder: Path) -> Path:
    """The folder of profiles that it reads: its samples, or those that Sailor made for it."""
    if problem.model == "GPT-1.5B":
        return metis / "profile_data_samples"
    folder = folder / "profiles"
    folder.mkdir()
    made = sailor / "sailor" / "Planner" / "baselines" / "Metis" / "profiles" / problem.model
    for name in problem.gpus:
        for path in sorted((made / sailor_name(name)).glob("mbs*_tmp*.json")):
            micro_batch, tensor = re.findall(r"\d+", path.name)
            profile = json.loads(path.read_text("utf-8"))
            profile["execution_time"]["forward_backward_time_ms"] += _BETWEEN_PASSES
            file = folder / f"DeviceType.{name}_tp{tensor}_bs{micro_batch}.json"
            file.write_text(json.dumps(profile), "utf-8")
    return folder


def run_metis(
    problem: PeerProblem,
    cluster: Cluster,
    *,
    metis: Path,
    profiles: Path,
    folder: Path,
    deadline: float,
) -> tuple[list[PeerPlan | None], str]:
    """Its plans, the best first, and why there are none.

    A plan is None where its stages cannot be charged, see `_plan`.
    """
    names = [kind.name for kind in cluster.kinds for _ in range(kind.nodes)]
    hosts, nodes, log = (folder / name for name in ("hostfile", "nodes.json", "log"))
    hosts.write_text("".join(f"n{n} slots={problem.gpus_per_node}\n" for n in range(len(names))))
    described = {
        f"n{number}": {
            "instance_type": name,
            "inter_bandwidth": cluster.kind(name).rail.bandwidth / 2**20,
            "intra_bandwidth": cluster.kind(name).intra_node.bandwidth / 2**20,
            "memory": cluster.kind(name).accelerator.memory_gib,
        }
        for number, name in enumerate(names)
    }
    nodes.write_text(json.dumps(described), "utf-8")
    model = model_of(problem)
    flags = {
        "model_name": "GPT",
        "num_layers": model.layers + 2,
        "gbs": problem.global_batch,
        "hidden_size": model.hidden,
        "sequence_length": model.seq_length,
        "vocab_size": model.vocabulary,
        "hostfile_path": hosts,
        "clusterfile_path": nodes,
        "profile_data_path": profiles,
        "max_profiled_tp_degree": max(problem.tensor),
        "max_profiled_batch_size": max(problem.micro_batch),
        # As its README runs it.
        "min_group_scale_variance": 1,
        "max_permute_len": 4,
    }
    script = metis / "cost_het_cluster.py"
    command = [sys.executable, str(script), *(f"--{name}={value}" for name, value in flags.items())]
    try:
        with log.open("w") as output:
            subprocess.run(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=deadline,
                # It goes through a set of names, and its ranking depends on their order.
                env=os.environ | {"PYTHONHASHSEED": "0"},
            )
    except subprocess.TimeoutExpired:
        return [], f"no plan in {deadline:g} s"
    lines = log.read_text("utf-8").splitlines()
    header = [number for number, line in enumerate(lines) if line.startswith("rank, cost,")]
    if not header:
        return [], f"it ends with {' '.join(lines[-1:])}"
    printed = lines[header[-1] + 1 : header[-1] + 1 + _LOOKED_AT]
    found = [_plan(match, problem) for line in printed if (match := _PLAN.fullmatch(line))]
    return found, "" if found else "it prints no plan"


def _plan(match: re.Match[str], problem: PeerProblem) -> PeerPlan | None:
    """None for stages without even an embedding, and for those of two kinds of GPUs.

    These give their replicas micro-batches of different sizes.
    """
    kinds = [
        name
        for name in re.findall(r"DeviceType\.(\w+)", match[1])
        for _ in range(problem.gpus[name])
    ]
    groups, strategies, ends = map(ast.literal_eval, (match[2], match[3], match[5]))
    layers = list(_decoders(ends))
    stages, first = [], 0
    for size, (data, tensor), count in zip(groups, strategies, layers, strict=True):
        held = set(kinds[first : first + size])
        first += size
        if len(held) > 1 or count < 0:
            return None
        replicas = (Replica(held.pop(), tensor),) * data
        stages.append(PeerStage(count, replicas, problem.global_batch // int(match[4]) // data))
    return PeerPlan(tuple(stages))


def _decoders(ends: list[int]) -> Iterator[int]:
    """Layers of each stage beside the embedding and the output layer, which are layers there."""
    last = len(ends) - 2
    for number in range(last + 1):
        yield ends[number + 1] - ends[number] - (number == 0) - (number == last)
