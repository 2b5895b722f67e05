"""Costs of a layer whose sequences several ranks share, from its costs of whole sequences.

A profile's points are of whole sequences. Of `context` ranks each has 1 / `context` of the rows, so
of all that is computed row by row: matrices, norms, the output layer. Its two chunks
(`context_chunks`) have as much of the causal attention, too: rows early in the sequence attend to
few others, late ones to many. So all seconds and bytes of a point divide by `context`. The cost of
a sequence of a `context`-th of the length would not do: its attention has 1 / `context`² of the
work. What comes on top is the ring of keys and values (`--cp-comm-type p2p`):

- Forward, `context` - 1 times, keys and values go to the next rank while attention to those held is
  computed. Backward they go round again, and their float32 gradients behind them, `context` times,
  the last time with nothing to hide behind. What a step's transfer takes longer than its computing
  is added.
- The outputs of the steps are merged, and gradients added up, in float32: bytes over the memory's
  bandwidth, those of the rank with most of them.
- Memory: two pairs of keys and values, and the float32 sums.

How long attention computes is its part of the layer's FLOPs. Attention mostly reaches less of the
peak than matrices do, so it takes longer than that and hides more of the ring: too pessimistic. Too
optimistic is that kernels are as efficient on fewer rows, and that latencies of tensor-parallel
exchanges divide, too. The search does not choose sizes that leave few rows unless it is asked to.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hetero.planner.cluster_shape import Cluster
from hetero.planner.communication_costs import next_rank_seconds
from hetero.planner.fp8 import flops_as_in_bf16
from hetero.planner.layer_profile import PartCosts, PassTimes
from hetero.planner.model_shape import ModelShape
from hetero.planner.stage_shape import StageShape
from hetero.planner.training_options import TrainingOptions

_SUM_BYTES = 4
_MERGED_BYTES = 24
"""Of memory traffic for each element of a step's output: the float32 output read and written when
it is scaled and when the step's is added, that one written as float32 and read."""
_ADDED_BYTES = 8
"""For each gradient of a step: the float32 sum read and written. What is added comes on top of
both, once, in the precision of the model."""


def with_ring(
    costs: PartCosts,
    stage: StageShape,
    *,
    cluster: Cluster,
    model: ModelShape,
    options: TrainingOptions,
) -> PartCosts:
    """A rank's part of the `costs` of whole sequences, with the ring."""
    shared = shared_costs(costs, stage, model=model, element_bytes=options.activation_bytes)
    ring = _Ring.of(stage, model)
    accelerator = cluster.kind(stage.kind).accelerator
    whole = flops_as_in_bf16(model, stage.fp8, accelerator, sparse=False)
    part = model.attention_flops / whole
    added = ring.seconds(cluster, stage, costs.layer, part=part, options=options)
    shared = replace(shared, layer=_sum(shared.layer, added))
    if not model.num_experts:
        return shared
    whole = flops_as_in_bf16(model, stage.fp8, accelerator, sparse=True)
    part = model.attention_flops / whole
    added = ring.seconds(cluster, stage, costs.sparse_layer, part=part, options=options)
    return replace(shared, sparse_layer=_sum(shared.sparse_layer, added))


def _sum(one: PassTimes, other: PassTimes) -> PassTimes:
    return PassTimes(one.forward + other.forward, one.backward + other.backward)


def shared_costs(
    costs: PartCosts, stage: StageShape, *, model: ModelShape, element_bytes: int
) -> PartCosts:
    """A rank's part of the costs of whole sequences, with the memory of the ring but not its time.

    The ring's buffers are added to a layer's other temporary memory, much of which is free while
    attention is computed: at most by as much too pessimistic.
    """
    if stage.context == 1:
        return costs
    values: dict[str, Any] = {
        name: PassTimes(cost.forward / stage.context, cost.backward / stage.context)
        if isinstance(cost, PassTimes)
        else cost / stage.context
        for name, cost in vars(costs).items()
    }
    # Neither weights nor the starts of kernels become fewer with the rows.
    values |= {name: getattr(costs, name) for name in ("experts_at_least", "sparse_layer_at_least")}
    ring = _Ring.of(stage, model).buffer_bytes(element_bytes)
    for part in ("layer", "sparse_layer", "embedding", "head"):
        values[f"{part}_working_bytes"] += ring
    return PartCosts(**values)


@dataclass(frozen=True)
class _Ring:
    """Elements that one rank holds of a layer and one micro-batch."""

    queries: float
    """As many as of attention's output."""
    keys_and_values: float
    """Of both together."""

    @classmethod
    def of(cls, stage: StageShape, model: ModelShape) -> _Ring:
        rows = stage.micro_batch * model.seq_length / stage.context / stage.tensor
        # Values narrower than keys are padded to their width.
        return cls(rows * model.attention_width, rows * 2 * model.key_width)

    def buffer_bytes(self, element_bytes: int) -> float:
        """In the backward pass, which needs more: keys and values held and received, their sums
        held and received, and the sums of the queries' gradients."""
        exchanged = 2 * self.keys_and_values * (element_bytes + _SUM_BYTES)
        return exchanged + self.queries * _SUM_BYTES

    def seconds(
        self,
        cluster: Cluster,
        stage: StageShape,
        layer: PassTimes,
        *,
        part: float,
        options: TrainingOptions,
    ) -> PassTimes:
        """What the ring adds to the passes of a layer, of which attention is this `part`.

        `layer` is of whole sequences.
        """
        element_bytes = options.activation_bytes
        bandwidth = cluster.kind(stage.kind).accelerator.memory_bandwidth
        merged = self.queries * (_MERGED_BYTES + element_bytes)
        added = (self.queries + self.keys_and_values) * (_ADDED_BYTES + element_bytes)
        sent = next_rank_seconds(cluster, stage, self.keys_and_values * element_bytes)
        returned = next_rank_seconds(cluster, stage, self.keys_and_values * _SUM_BYTES)
        computed = layer.forward * part
        computed_backward = layer.backward * part
        if stage.recompute == "selective":
            # The backward pass has computed attention again, and nothing else.
            computed_backward = (layer.backward - computed) * part
        elif stage.recompute == "full":
            computed_backward -= computed
        steps = stage.context
        step, step_backward = computed / steps**2, max(computed_backward, 0.0) / steps**2
        forward = (steps - 1) * max(sent - step, 0.0) + steps * merged / bandwidth
        backward = (steps - 1) * max(sent + returned - step_backward, 0.0) + returned
        backward += steps * added / bandwidth
        if stage.recompute != "none":
            backward += forward
        return PassTimes(forward, backward)
