"""Costs of a sparse layer whose experts several ranks share, from its costs without an exchange.

A profile's points are of ranks that hold all experts, each of them divided as other matrices are,
and have nothing of what these ranks send each other. Of `experts` (EP) times `ranks_per_expert`
(ETP) ranks each computes as much as such a rank: the tokens of EP times as many ranks go to an
EP-th of the experts. On top come:

- The tokens, there and back, in both passes. `alltoall` sends each rank the rows of its experts,
  one for each expert of a token, and the ranks that share an expert gather them. `allgather` sends
  every rank the rows of all, and sums up what comes back. Recomputing a layer sends them again.
- The busiest rank. A router does not choose all experts equally often, and a layer is through when
  the last rank is: what experts compute, receive and keep is multiplied by `expert_imbalance`
  where EP is above 1. A rank that holds all experts has all tokens, whichever they choose.
- What experts take whatever their tokens. With few tokens for each of them a rank waits for
  weights out of its memory, or where the accelerator computes one expert after the other for its
  host to start them, rather than for products. A rank with an EP-th of the experts waits for an
  EP-th.
- What the host takes to start the kernels of the layer, however few its experts and tokens are.
  An exchange adds to it: the host waits for the sizes, and so does not run ahead of the GPU.

How long experts compute is their part of the layer's FLOPs, of which those in fp8 count by how much
faster they are. In fp8 a rank casts the rows that it has gathered, more or fewer than the point's.
Not modelled: capacities, which drop tokens; groups of experts; that products with few rows are less
efficient beyond that; shared experts that overlap the exchange (taken as computed before it).
"""

from __future__ import annotations

from dataclasses import replace

from hetero.planner.cluster_shape import Cluster
from hetero.planner.communication_costs import all_to_all_seconds, gather_seconds
from hetero.planner.fp8 import (
    cast_bytes,
    expert_cast_width,
    expert_flops_as_in_bf16,
    flops_as_in_bf16,
)
from hetero.planner.layer_profile import PartCosts, PassTimes
from hetero.planner.model_shape import ModelShape
from hetero.planner.stage_shape import StageShape
from hetero.planner.training_options import TrainingOptions

EXCHANGE_HOST_SECONDS = 2.8e-3
"""Of a host, in one pass of a layer, where ranks exchange tokens: to start the exchange, and to
wait for the GPU and the other ranks. Fitted to one run of 20 of Qwen3-30B-A3B's layers with EP 2 on
two H200 (docs/planner.md, "Mixtures of experts")."""


def with_experts(
    costs: PartCosts,
    stage: StageShape,
    *,
    cluster: Cluster,
    model: ModelShape,
    options: TrainingOptions,
) -> PartCosts:
    """`costs` of a rank of `stage`, its part of the sequences, with all that experts add."""
    exchange = exchange_seconds(cluster, stage, model=model, options=options)
    if stage.ranks_of_experts > 1:
        exchange = max(exchange, EXCHANGE_HOST_SECONDS)
    accelerator = cluster.kind(stage.kind).accelerator
    whole = flops_as_in_bf16(model, stage.fp8, accelerator, sparse=True)
    computing = expert_flops_as_in_bf16(model, stage.fp8, accelerator) / whole
    again = 2 if stage.recompute == "full" else 1
    layer, casts = costs.sparse_layer, _more_cast_bytes(stage, model) / accelerator.memory_bandwidth
    forward = _busiest_seconds(
        layer.forward + casts, costs.experts_at_least.forward, stage, computing, options
    )
    backward = _busiest_seconds(
        layer.backward + again * casts, costs.experts_at_least.backward, stage, computing, options
    )
    forward = max(forward, costs.sparse_layer_at_least.forward)
    backward = max(backward, costs.sparse_layer_at_least.backward)
    return replace(
        costs_of_memory(costs, stage, model=model, options=options),
        sparse_layer=PassTimes(forward + exchange, backward + again * exchange),
    )


def _busiest_seconds(
    seconds: float, at_least: float, stage: StageShape, part: float, options: TrainingOptions
) -> float:
    """A pass of a sparse layer, of which experts are this part, on the rank with most tokens."""
    experts = seconds * part
    return seconds - experts + max(experts * imbalance(stage, options), at_least / stage.experts)


def _more_cast_bytes(stage: StageShape, model: ModelShape) -> float:
    """Memory traffic of casting a micro-batch's rows of hidden size in one pass, beyond that of the
    point's ranks, which gather them over the whole tensor-parallel group; mostly below 0."""
    if not stage.fp8.is_used or not stage.fp8.experts:
        return 0.0
    chosen = _rows(stage, model) * model.experts_per_token
    more = chosen * (stage.ranks_per_expert - stage.tensor) * model.hidden
    return more * cast_bytes(stage.fp8.recipe, transposed=False)


def imbalance(stage: StageShape, options: TrainingOptions) -> float:
    """Tokens of the stage's busiest expert-parallel rank, in parts of the mean."""
    return options.expert_imbalance if stage.experts > 1 else 1.0


def exchange_seconds(
    cluster: Cluster, stage: StageShape, *, model: ModelShape, options: TrainingOptions
) -> float:
    """Seconds of sending a micro-batch's tokens to their experts and back, in one pass."""
    rows = _rows(stage, model) * model.hidden * options.activation_bytes
    if options.expert_dispatcher == "allgather":
        ranks = stage.ranks_of_experts
        return 2 * gather_seconds(cluster, stage, ranks=ranks, size=ranks * rows)
    chosen = rows * model.experts_per_token * imbalance(stage, options)
    width = stage.ranks_per_expert
    seconds = all_to_all_seconds(cluster, stage, chosen)
    return 2 * (seconds + gather_seconds(cluster, stage, ranks=width, size=width * chosen))


def costs_of_memory(
    costs: PartCosts, stage: StageShape, *, model: ModelShape, options: TrainingOptions
) -> PartCosts:
    """`costs` with the bytes that experts of this stage add; seconds are as they were.

    The point's ranks gather the tokens of each expert over the whole tensor-parallel group.
    """
    factor = imbalance(stage, options)
    rows = _rows(stage, model) * options.activation_bytes
    chosen = rows * model.experts_per_token
    inputs = (stage.ranks_per_expert * factor - stage.tensor) * model.hidden
    widths = (3 if model.gated else 2) * model.expert_ffn
    kept = chosen * (inputs + (factor - 1) * widths)
    temporary = chosen * (2 * inputs + (factor - 1) * widths)
    if options.expert_dispatcher == "allgather" and stage.ranks_of_experts > 1:
        temporary += 2 * stage.ranks_of_experts * rows * model.hidden
    elif stage.ranks_of_experts > 1:
        temporary += 2 * chosen * model.hidden
    if stage.fp8.is_used and stage.fp8.experts:
        own = factor * expert_cast_width(model, ranks=stage.ranks_per_expert)
        more = own - expert_cast_width(model, ranks=stage.tensor)
        temporary += _rows(stage, model) * model.experts_per_token * more
    if stage.recompute == "full":
        kept, temporary = 0.0, kept + temporary
    return replace(
        costs,
        sparse_layer_activation_bytes=costs.sparse_layer_activation_bytes + kept,
        sparse_layer_working_bytes=costs.sparse_layer_working_bytes + temporary,
    )


def _rows(stage: StageShape, model: ModelShape) -> float:
    """Tokens of a micro-batch that a rank routes: sequence parallelism divides them."""
    return stage.micro_batch * model.seq_length / stage.context / stage.tensor
