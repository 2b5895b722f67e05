"""Costs of multi-token prediction, from those of a layer, the embedding and the output layer.

The last stage has MTP layers behind its other layers, in one pass with its output layer, whatever
the plan. So what they cost is part of the head's costs. Each has

- the embedding of the tokens ahead, and a projection of that and of a hidden state to a hidden
  state: so much of a layer's time as its FLOPs are of that layer's. Tensor-parallel ranks gather
  what it takes and gives, which comes on top;
- a layer like the model's last one, with the ring of shared sequences and the exchange of experts;
- what the head has: a norm, the output layer, and a loss of its own. All layers' losses are
  differentiated after the last one's, so that each keeps what its backward pass needs of the
  logits. The logits themselves are freed before further ones are computed.

Recomputing a layer leaves its embedding and its output layer out. Norms of what the projection
takes are not counted, but for what the layer's time has of its own; nor is that the projection
keeps less in fp8.
"""

from __future__ import annotations

from dataclasses import replace

from hetero.planner.cluster_shape import Cluster
from hetero.planner.communication_costs import ring_seconds
from hetero.planner.layer_profile import PartCosts, PassTimes
from hetero.planner.model_shape import ModelShape
from hetero.planner.stage_shape import StageShape
from hetero.planner.training_options import TrainingOptions


def stage_of_mtp_layers(stage: StageShape, options: TrainingOptions) -> StageShape:
    """The stage as its MTP layers see it, which may not be recomputed where its layers are."""
    is_left_out = stage.recompute == "full" and not options.recomputes_mtp_layers
    return replace(stage, recompute="none") if is_left_out else stage


def with_mtp(
    costs: PartCosts,
    of_layers: PartCosts,
    stage: StageShape,
    *,
    cluster: Cluster,
    model: ModelShape,
    options: TrainingOptions,
) -> PartCosts:
    """`costs` of a rank of a last stage, its part of sequences and experts, with MTP layers.

    `of_layers` are those of `stage_of_mtp_layers`.
    """
    parts = (
        of_layers.sparse_layer if model.mtp_is_sparse else of_layers.layer,
        _projection_seconds(of_layers, stage, cluster=cluster, model=model, options=options),
        of_layers.embedding,
        of_layers.head,
    )
    head = PassTimes(
        costs.head.forward + model.mtp_layers * sum(part.forward for part in parts),
        costs.head.backward + model.mtp_layers * sum(part.backward for part in parts),
    )
    with_memory = costs_of_mtp_memory(costs, of_layers, stage, model=model, options=options)
    return replace(with_memory, head=head)


def _projection_seconds(
    of_layers: PartCosts,
    stage: StageShape,
    *,
    cluster: Cluster,
    model: ModelShape,
    options: TrainingOptions,
) -> PassTimes:
    """Of an MTP layer's projection. A dense layer says best how fast products are: a sparse one
    waits for its tokens, too."""
    layer, flops = of_layers.layer, model.layer_flops
    if not layer.forward + layer.backward:
        layer, flops = of_layers.sparse_layer, model.sparse_layer_flops
    part = model.mtp_projection_flops / flops
    size = _rows(stage, model) * model.hidden * options.activation_bytes
    link = cluster.kind(stage.kind).intra_node
    once = ring_seconds(link, ranks=stage.tensor, size=size)
    # Its output is gathered, and the gradient of its two inputs summed up. Sequence parallelism
    # gathers the inputs, again for the weight gradient, and scatters both gradients.
    forward, backward = (3, 5) if stage.sequence_parallel else (1, 4)
    if stage_of_mtp_layers(stage, options).recompute == "full":
        backward += forward
    return PassTimes(part * layer.forward + forward * once, part * layer.backward + backward * once)


def costs_of_mtp_memory(
    costs: PartCosts,
    of_layers: PartCosts,
    stage: StageShape,
    *,
    model: ModelShape,
    options: TrainingOptions,
) -> PartCosts:
    """`costs` with the bytes of MTP layers; seconds are as they were."""
    layer = "sparse_layer" if model.mtp_is_sparse else "layer"
    kept, working, delayed = (
        getattr(of_layers, f"{layer}_{what}_bytes") for what in ("activation", "working", "delayed")
    )
    of_hidden = _rows(stage, model) * model.hidden * options.activation_bytes
    hidden = of_hidden / (stage.tensor if stage.sequence_parallel else 1)
    # The embedding, and both inputs of the projection after their norms. The hidden state that it
    # takes is the output layer's input too.
    inputs = 3 * hidden
    if stage_of_mtp_layers(stage, options).recompute == "full":
        working += inputs
    else:
        kept += inputs
    kept += of_layers.head_activation_bytes - of_layers.head_passing_bytes
    delayed += of_layers.head_delayed_bytes + (2 + 1 / stage.tensor) * of_hidden
    return replace(
        costs,
        head_activation_bytes=costs.head_activation_bytes + model.mtp_layers * kept,
        head_working_bytes=max(
            costs.head_working_bytes, working, of_layers.embedding_working_bytes
        ),
        head_delayed_bytes=costs.head_delayed_bytes + model.mtp_layers * delayed,
    )


def _rows(stage: StageShape, model: ModelShape) -> float:
    """Tokens of a micro-batch that a tensor-parallel group holds."""
    return stage.micro_batch * model.seq_length / stage.context
