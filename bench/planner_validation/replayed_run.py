"""A recorded run through this project's simulator, from the profiles of its repository."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from itertools import combinations
from pathlib import Path

from bench.planner_validation.recorded_runs import Record
from hetero.planner.accelerators import Accelerator
from hetero.planner.cluster_shape import Cluster, LinkModel, NodeKind
from hetero.planner.communication_costs import ring_seconds, tied_embedding_seconds
from hetero.planner.import_sailor import import_sailor, inter_node_link, intra_node_link
from hetero.planner.layer_profile import MeasuredProfile, ProfileError
from hetero.planner.model_shape import ModelShape
from hetero.planner.pipeline_simulator import simulate_pipeline
from hetero.planner.stage_shape import StageShape
from hetero.planner.step_costs import Copies, CostModel
from hetero.planner.training_options import TrainingOptions

ZONE = "us-central1-a"
"""Under this name the repository keeps all its bandwidths of one site."""
_OPTIONS = TrainingOptions(
    activation_bytes=4, parameter_bytes=4, gradient_bytes=4, state_bytes=8, deepspeed_transfers=True
)
_UNKNOWN = "not asked of a measured profile"


def _model(*, layers: int, hidden: int, heads: int, tied: bool) -> ModelShape:
    """GPT as Megatron-DeepSpeed builds it: GPT-2's 50,257 tokens padded to a multiple of 128."""
    return ModelShape(
        layers=layers,
        hidden=hidden,
        ffn=4 * hidden,
        heads=heads,
        query_groups=heads,
        head_size=hidden // heads,
        vocabulary=50304,
        seq_length=2048,
        gated=False,
        tied=tied,
        linear_bias=True,
        norm_weights=2,
        learned_positions=2048,
    )


MODELS = {
    "OPT-350": _model(layers=24, hidden=1024, heads=16, tied=False),
    "GPT-Neo-2.7": _model(layers=32, hidden=2560, heads=20, tied=True),
}


class Replay:
    """Predicts records of one checkout."""

    def __init__(self, checkout: Path) -> None:
        self._folder = checkout / "sailor"
        self._profile = cache(self._read_profile)

    def _read_profile(self, model: str) -> MeasuredProfile:
        return import_sailor(self._folder, model, MODELS[model])

    def seconds(self, record: Record) -> float:
        """One step: the slowest pipeline, the slowest stage's reduction, the slowest update.

        DeepSpeed meets in a barrier before it reduces, and its all-reduce is one ring over all
        replicas of a stage, at the speed of its slowest wire.
        """
        cluster = self._cluster(record)
        model, profile = MODELS[record.model], self._profile(record.model)
        cost_model = CostModel(model, cluster, profile, _OPTIONS)
        pipelines = [_stages(record, replica) for replica in range(record.data)]
        passes = max(
            simulate_pipeline(cost_model.pipeline_times(stages, record.micro_batches)).seconds
            for stages in pipelines
        )
        reduce = [
            self._reduce(cluster, dp_group, model) for dp_group in zip(*pipelines, strict=True)
        ]
        if model.tied and len(pipelines[0]) > 1:
            first, last = pipelines[0][0], pipelines[0][-1]
            passes += tied_embedding_seconds(cluster, first, last, model=model, options=_OPTIONS)
        copies = Copies(shared=record.data, experts=record.data)
        updates = [cost_model.update(stage, copies) for stages in pipelines for stage in stages]
        return passes + max(reduce) + max(updates)

    def _cluster(self, record: Record) -> Cluster:
        """A node for each tensor-parallel group, each GPU with a wire of its own.

        The wire is what was measured between two such nodes while as many GPUs sent as a group has.
        """
        kinds = []
        for name in record.kinds:
            rail = inter_node_link(self._folder, name, record.tensor, zone=ZONE)
            inside = (
                intra_node_link(self._folder, name, record.tensor) if record.tensor > 1 else rail
            )
            accelerator = accelerator_of(name, rail)
            nodes = record.data * len(record.stages)
            kinds.append(
                NodeKind(name, accelerator, nodes, record.tensor, record.tensor, inside, rail)
            )
        between = {}
        for pair in combinations(record.kinds, 2):
            if ways := self._ways(pair, record.tensor):
                between[frozenset(pair)] = min(ways, key=lambda wire: wire.bandwidth)
        return Cluster(tuple(kinds), between)

    def _ways(self, pair: tuple[str, str], senders: int) -> list[LinkModel]:
        """There and back, as far as measured. A step uses both, so the slower one counts."""
        found = []
        for source, target in (pair, pair[::-1]):
            with suppress(ProfileError):
                found.append(inter_node_link(self._folder, source, senders, zone=ZONE, to=target))
        return found

    def _reduce(
        self, cluster: Cluster, dp_group: tuple[StageShape, ...], model: ModelShape
    ) -> float:
        size = dp_group[0].parameters(model) * _OPTIONS.gradient_bytes
        names = [stage.kind for stage in dp_group]
        wires = [cluster.rail(one, other) for one in names for other in names]
        slowest = max(wires, key=lambda wire: wire.seconds(size))
        return 2 * ring_seconds(slowest, ranks=len(dp_group), size=size)


def _stages(record: Record, replica: int) -> list[StageShape]:
    stages = []
    last = len(record.stages) - 1
    for number, layers in enumerate(record.stages):
        decoders = layers - (number == 0) - (number == last)
        stages.append(
            StageShape(
                kind=record.kinds_of_stages[number][replica],
                # Stages never share a node.
                first_gpu=number * record.tensor,
                layers=(decoders,),
                has_embedding=number == 0,
                has_head=number == last,
                tensor=record.tensor,
                micro_batch=record.micro_batch,
            )
        )
    return stages


def accelerator_of(name: str, rail: LinkModel, *, memory_gib: float = 1.0) -> Accelerator:
    """A name for the profile; memory and peak have no part in a step's time."""
    return Accelerator(
        name=name,
        vendor="nvidia",
        memory_gib=memory_gib,
        flops=1.0,
        memory_bandwidth=1.0,
        link_bandwidth=1.0,
        link_latency=1.0,
        nic_bandwidth=rail.bandwidth,
        source=_UNKNOWN,
        link_source=_UNKNOWN,
        nic_source=_UNKNOWN,
    )
