"""A plan on a cluster: what costs are computed for, what search compares and tools write."""

from __future__ import annotations

from dataclasses import dataclass

from hetero.formatting import counted
from hetero.plan import Plan, PlanError
from hetero.planner.cluster_shape import Cluster
from hetero.planner.model_shape import ModelShape


@dataclass(frozen=True)
class Placement:
    """Which kind of node each mesh of a plan stands on, and the batch it trains with."""

    plan: Plan
    kinds: tuple[str, ...]
    """A name of `Cluster.kinds` for each mesh. Two meshes may share a kind and divide its nodes."""
    global_batch: int
    """Samples of a step, over all replicas."""

    def require_fit(self, cluster: Cluster, model: ModelShape) -> None:
        """Raise PlanError where the plan is not of this cluster and model."""
        if len(self.kinds) != len(self.plan.meshes):
            raise PlanError(
                f"the plan has {counted(len(self.plan.meshes), 'mesh', 'meshes')} and kinds of "
                f"nodes are given for {len(self.kinds)}"
            )
        self.plan.require_layers(model.layers)
        needed: dict[str, int] = {}
        for name, mesh in zip(self.kinds, self.plan.meshes, strict=True):
            kind = cluster.kind(name)
            needed[name] = needed.get(name, 0) + mesh.world_size
            if mesh.vendor != kind.vendor:
                raise PlanError(f"a {mesh.vendor} mesh cannot stand on {name} of {kind.vendor}")
        for name, ranks in needed.items():
            if ranks > cluster.kind(name).gpus:
                raise PlanError(
                    f"the plan takes {ranks} GPUs of {name}; there are {cluster.kind(name).gpus}"
                )
