"""Problems that another planner's own profiles cover, as this project's planner is asked them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.planner_validation.replayed_run import MODELS, ZONE, accelerator_of
from hetero.planner.accelerators import Accelerator, built_in_accelerators
from hetero.planner.cluster_shape import Cluster, LinkModel, NodeKind, link_inside_node
from hetero.planner.import_metis import import_metis
from hetero.planner.import_sailor import import_sailor, inter_node_link, intra_node_link
from hetero.planner.layer_profile import MeasuredProfile
from hetero.planner.model_shape import ModelShape
from hetero.planner.search_space import Problem, SearchSpace
from hetero.planner.training_options import TrainingOptions

_MEMORY_GIB = {"A100-40": 40, "V100-16": 16, "GH-96": 96, "A100": 80, "V100": 16}
"""As both planners are told it."""

_SAILOR_OPTIONS = TrainingOptions(
    activation_bytes=4,
    parameter_bytes=4,
    gradient_bytes=4,
    # Sailor counts 24 bytes a parameter, and 3e9 beside the model.
    state_bytes=16,
    reserved_bytes=3e9,
)
_METIS_OPTIONS = TrainingOptions()

GPT = ModelShape(
    layers=8,
    hidden=4096,
    ffn=16384,
    heads=32,
    query_groups=32,
    head_size=128,
    # The rows that the profile's embedding has.
    vocabulary=96000,
    seq_length=1024,
    gated=False,
    tied=False,
)
"""The model of Metis' sample profiles, as its script names it."""


@dataclass(frozen=True)
class PeerProblem:
    """What is to be planned: GPUs of each kind by Sailor's names, or Metis' in its own samples."""

    peer: str
    model: str
    gpus: Mapping[str, int]
    global_batch: int
    gpus_per_node: int = 4
    tensor: tuple[int, ...] = (1, 2, 4)
    micro_batch: tuple[int, ...] = (1, 2, 4, 8)

    @property
    def name(self) -> str:
        kinds = " + ".join(f"{count} {name}" for name, count in self.gpus.items())
        return f"{self.model}, {kinds}, batch {self.global_batch}"


_SMALL = (1, 2, 4)
"""Micro-batches of which every GPU has a profile at tensor size 1, without which Metis fails."""

PROBLEMS = (
    PeerProblem("Metis", "GPT-1.5B", {"A100": 8}, 128, micro_batch=_SMALL),
    PeerProblem("Metis", "GPT-1.5B", {"A100": 16}, 128, micro_batch=_SMALL),
    PeerProblem("Metis", "GPT-1.5B", {"A100": 32}, 256, micro_batch=_SMALL),
    PeerProblem("Metis", "OPT-350", {"A100": 4, "V100": 4}, 128, micro_batch=_SMALL),
    PeerProblem("Metis", "OPT-350", {"A100": 8, "V100": 8}, 256, micro_batch=_SMALL),
    PeerProblem("Metis", "OPT-350", {"A100": 8, "V100": 24}, 256, micro_batch=_SMALL),
    PeerProblem("Metis", "GPT-Neo-2.7", {"A100": 8, "V100": 8}, 128, micro_batch=_SMALL),
    PeerProblem("Metis", "GPT-Neo-2.7", {"A100": 16, "V100": 16}, 256, micro_batch=_SMALL),
    PeerProblem("Metis", "OPT-350", {"A100": 32, "V100": 32}, 512, micro_batch=_SMALL),
    PeerProblem("Sailor", "OPT-350", {"A100-40": 32}, 1024),
    PeerProblem("Sailor", "OPT-350", {"A100-40": 128}, 1024),
    PeerProblem("Sailor", "OPT-350", {"A100-40": 80}, 1024),
    PeerProblem("Sailor", "GPT-Neo-2.7", {"A100-40": 32}, 2048),
    PeerProblem("Sailor", "OPT-350", {"A100-40": 8, "V100-16": 8}, 256),
    PeerProblem("Sailor", "OPT-350", {"A100-40": 32, "V100-16": 96}, 1024),
    PeerProblem("Sailor", "OPT-350", {"A100-40": 80, "V100-16": 240}, 1024),
    PeerProblem("Sailor", "OPT-350", {"A100-40": 128, "V100-16": 384}, 1024),
    PeerProblem("Sailor", "OPT-350", {"A100-40": 256, "V100-16": 768}, 2048),
    PeerProblem("Sailor", "GPT-Neo-2.7", {"A100-40": 32, "V100-16": 96}, 2048),
    PeerProblem("Sailor", "GPT-Neo-2.7", {"A100-40": 128, "V100-16": 128}, 2048),
)


def model_of(problem: PeerProblem) -> ModelShape:
    return GPT if problem.model == "GPT-1.5B" else MODELS[problem.model]


def asked(problem: PeerProblem, *, sailor: Path, profiles: Path | None) -> Problem:
    """The same for this project's planner; `profiles` is the folder that Metis reads."""
    model = model_of(problem)
    profile: MeasuredProfile
    if profiles is not None:
        profile = import_metis(profiles, seq_length=model.seq_length)
    else:
        profile = import_sailor(sailor / "sailor", problem.model, model)
    space = SearchSpace(
        global_batch=problem.global_batch,
        tensor=problem.tensor,
        micro_batch=problem.micro_batch,
        recompute=("none",),
        distributed_optimizer=False,
    )
    options = _METIS_OPTIONS if problem.model == "GPT-1.5B" else _SAILOR_OPTIONS
    return Problem(cluster_of(problem, sailor), model, profile, space, options)


def cluster_of(problem: PeerProblem, sailor: Path) -> Cluster:
    """Nodes whose GPUs have a wire each, as Sailor measured it while all of a node sent."""
    kinds = []
    for name, gpus in problem.gpus.items():
        nodes = gpus // problem.gpus_per_node
        inside, rail, accelerator = _parts(problem, name, sailor)
        size = problem.gpus_per_node
        kinds.append(NodeKind(name, accelerator, nodes, size, size, inside, rail))
    return Cluster(tuple(kinds), {})


def _parts(
    problem: PeerProblem, name: str, sailor: Path
) -> tuple[LinkModel, LinkModel, Accelerator]:
    if problem.model == "GPT-1.5B":
        part = built_in_accelerators()["A100-SXM4-80GB"]
        inside = link_inside_node(part)
        rail = LinkModel(part.nic_bandwidth, 15e-6)
    else:
        folder, known = sailor / "sailor", sailor_name(name)
        inside = intra_node_link(folder, known, problem.gpus_per_node)
        rail = inter_node_link(folder, known, problem.gpus_per_node, zone=ZONE)
    return inside, rail, accelerator_of(name, rail, memory_gib=_MEMORY_GIB[name])


def sailor_name(name: str) -> str:
    """Metis knows four names of GPUs, without their memory."""
    return {"A100": "A100-40", "V100": "V100-16"}.get(name, name)
