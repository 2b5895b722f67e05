"""A plan placed on a cluster: the input of the cost model and the output of the search."""

from __future__ import annotations

from dataclasses import dataclass

from hetero.errors import UserError
from hetero.plan import Plan
from hetero.planner.cluster_shape import Cluster
from hetero.planner.model_shape import ModelShape
from hetero.text import counted


@dataclass(frozen=True)
class Placement:
    """A plan, the kind of node of each of its meshes, and the global batch."""

    plan: Plan
    kinds: tuple[str, ...]
    """For each mesh a name of `Cluster.kinds`. Meshes may share a kind and divide its nodes."""
    global_batch: int
    """Samples per training step, over all replicas."""

    def require_fit(self, cluster: Cluster, model: ModelShape) -> None:
        """Raise UserError where the plan does not match the cluster or the model."""
        if len(self.kinds) != len(self.plan.meshes):
            raise UserError(
                f"the plan has {counted(len(self.plan.meshes), 'mesh', 'meshes')} and kinds of "
                f"nodes are given for {len(self.kinds)}"
            )
        self.plan.require_layers(model.layers)
        needed: dict[str, int] = {}
        for name, mesh in zip(self.kinds, self.plan.meshes, strict=True):
            kind = cluster.kind(name)
            needed[name] = needed.get(name, 0) + mesh.world_size
            if mesh.vendor != kind.vendor:
                raise UserError(f"a {mesh.vendor} mesh cannot stand on {name} of {kind.vendor}")
        for name, ranks in needed.items():
            if ranks > cluster.kind(name).gpus:
                raise UserError(
                    f"the plan takes {ranks} GPUs of {name}; there are {cluster.kind(name).gpus}"
                )
