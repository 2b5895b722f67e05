"""Costs of one rank of a stage: a profile's point, and what ranks add that share its work."""

from __future__ import annotations

from hetero.planner.cluster_shape import Cluster
from hetero.planner.context_costs import shared_costs, with_ring
from hetero.planner.expert_costs import costs_of_memory, with_experts
from hetero.planner.layer_profile import PartCosts, Profile, ProfileError
from hetero.planner.model_shape import ModelShape
from hetero.planner.mtp_costs import costs_of_mtp_memory, stage_of_mtp_layers, with_mtp
from hetero.planner.stage_shape import StageShape
from hetero.planner.training_options import TrainingOptions


def stage_costs(
    cluster: Cluster,
    stage: StageShape,
    *,
    model: ModelShape,
    profile: Profile,
    options: TrainingOptions,
) -> PartCosts:
    """The costs of one rank of a stage. Raises ProfileError where the profile lacks its point."""
    name = cluster.kind(stage.kind).accelerator.name

    def of(one: StageShape) -> PartCosts:
        point = one.point(model)
        costs = profile.costs(name, point)
        if one.context > 1:
            costs = with_ring(costs, one, cluster=cluster, model=model, options=options)
        if not model.num_experts:
            return costs
        if not costs.sparse_layer.forward + costs.sparse_layer.backward:
            raise ProfileError(f"the profile of {name} has no layer with experts at {point}")
        return with_experts(costs, one, cluster=cluster, model=model, options=options)

    costs = of(stage)
    if not model.mtp_layers:
        return costs
    of_layers = of(stage_of_mtp_layers(stage, options))
    return with_mtp(costs, of_layers, stage, cluster=cluster, model=model, options=options)


def memory_costs(
    accelerator: str,
    stage: StageShape,
    *,
    model: ModelShape,
    profile: Profile,
    options: TrainingOptions,
) -> PartCosts:
    """The costs of one rank of a stage, of which the bytes alone are what the rank has."""

    def of(one: StageShape) -> PartCosts:
        whole = profile.costs(accelerator, one.point(model))
        shared = shared_costs(whole, one, model=model, element_bytes=options.activation_bytes)
        if not model.num_experts:
            return shared
        return costs_of_memory(shared, one, model=model, options=options)

    costs = of(stage)
    if not model.mtp_layers:
        return costs
    of_layers = of(stage_of_mtp_layers(stage, options))
    return costs_of_mtp_memory(costs, of_layers, stage, model=model, options=options)
