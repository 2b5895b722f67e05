"""An analytic profile of hardware that has not been measured, from its published specification.

A roofline model: matrix multiplications and attention run at a fixed fraction of the FLOP/s that
the largest matrix products reach, the rest of a layer at the memory bandwidth, and tensor-parallel
all-reduces over the node's links. The fraction is calibrated on one measured accelerator. Products
in fp8 run at the same fraction of fp8's FLOP/s, and what they take is cast at the memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hetero.plan.plan import NO_FP8
from hetero.planner.accelerators import MATMUL_PART, Accelerator
from hetero.planner.cluster_shape import Cluster, link_inside_node
from hetero.planner.communication_costs import ring_seconds
from hetero.planner.fp8 import Fp8Layer, linear_parameters
from hetero.planner.layer_profile import MeasuredProfile, PartCosts, PassTimes, Point, ProfileError
from hetero.planner.model_shape import ModelShape

EFFICIENCY = 0.63 / MATMUL_PART
"""Of an accelerator's `matmul_flops`, what a model's matrix multiplications and attention reach.
Calibrated so that LLaMA-8B reaches the 571.6 TFLOP/s measured on H200, which is 0.63 of its peak
(docs/benchmarks/published_table.md)."""
_UPDATE_BYTES_PER_PARAMETER = 42
"""Memory traffic of an optimizer step: the gradient read twice (norm, update) and zeroed, the fp32
weight and two moments read and written, the bf16 weight written."""
_GRADIENT_BYTES = 8
"""Memory traffic of adding to a parameter's fp32 gradient: it is read and written."""
_EXPERT_SECONDS = 1e-4
"""Of a host, to start the kernels of one expert in one pass, where they are computed one after the
other. A core of a server took 1.3e-4 to 2.7e-4 seconds; no GPU's host was measured."""
_SPARSE_LAYER_HOST = PassTimes(4.4e-3, 4.8e-3)
"""Of a host, to start all kernels of a layer with experts, for which a GPU waits where they are
short. Fitted to two runs of Qwen3-30B-A3B's layers on an H200 machine with 16 cores, torch 2.11:
6 layers on one GPU, of which the kernels took 0.34 of 0.53 seconds, and 20 layers on two
(docs/planner.md, "Mixtures of experts")."""
_SPARSE_TRAFFIC = 3.0
"""Of a layer with experts, what norms, activation functions and the order of tokens take of the
memory's time, in parts of what their inputs and outputs do: they are many kernels, some in fp32.
Fitted to the kernels of the same 6 layers, of which these took 1.8 ms a layer and micro-batch."""
_SCORE_BYTES = 9
"""Of a token and an expert: the router's score and probability in fp32, and whether it is chosen.
"""
_REDUCTION_BYTES_PER_PARAMETER = 20
"""Memory traffic of scaling an fp32 gradient in place and adding another one to it."""


@dataclass(frozen=True)
class AnalyticProfile:
    """A `Profile` computed from published specifications, for any point."""

    model: ModelShape
    accelerators: Mapping[str, Accelerator]
    efficiency: float = EFFICIENCY
    element_bytes: int = 2
    """Of an activation: 2 in bf16 and fp16."""

    def costs(self, accelerator: str, point: Point) -> PartCosts:
        part = self._accelerator(accelerator)
        return _PointModel(self.model, part, point, self.efficiency, self.element_bytes).costs()

    def optimizer_seconds(self, accelerator: str, parameters: float) -> float:
        return (
            parameters
            * _UPDATE_BYTES_PER_PARAMETER
            / self._accelerator(accelerator).memory_bandwidth
        )

    def reduction_seconds(self, accelerator: str, parameters: float) -> float:
        return (
            parameters
            * _REDUCTION_BYTES_PER_PARAMETER
            / self._accelerator(accelerator).memory_bandwidth
        )

    def _accelerator(self, accelerator: str) -> Accelerator:
        try:
            return self.accelerators[accelerator]
        except KeyError:
            raise ProfileError(
                f"the profile has no {accelerator}; it has {', '.join(self.accelerators)}"
            ) from None


def analytic_profile(
    model: ModelShape, cluster: Cluster, *, efficiency: float = EFFICIENCY, element_bytes: int = 2
) -> AnalyticProfile:
    """The profile of all accelerators of a cluster."""
    accelerators = {kind.accelerator.name: kind.accelerator for kind in cluster.kinds}
    return AnalyticProfile(model, accelerators, efficiency, element_bytes)


def measured_efficiency(
    measured: MeasuredProfile,
    accelerator: Accelerator,
    model: ModelShape,
    *,
    element_bytes: int = 2,
) -> float:
    """Of an accelerator's `matmul_flops`, what it reached over all measured points."""
    profile = measured.accelerators.get(accelerator.name)
    if profile is None:
        raise ProfileError(
            f"the profile to calibrate with has no {accelerator.name}; it has "
            f"{', '.join(measured.accelerators)}"
        )
    measured_seconds = matmul_seconds = 0.0
    for point, costs in profile.points.items():
        layer = _PointModel(model, accelerator, point, 1.0, element_bytes)
        products, casts = layer.products, layer.casts
        other_seconds = layer.memory_bound_seconds * 3 + layer.all_reduce_seconds * 2
        other_seconds += casts.forward + casts.backward
        matmul_seconds += products.forward + products.backward
        if point.recompute == "full":
            other_seconds += layer.memory_bound_seconds + layer.all_reduce_seconds
            matmul_seconds += products.forward
        measured_seconds += max(costs.layer.forward + costs.layer.backward - other_seconds, 0.0)
    if not measured_seconds > matmul_seconds * accelerator.matmul_flops / accelerator.flops:
        raise ProfileError(
            f"the profile of {accelerator.name} is faster than its peak allows; it was measured "
            "with another model, or the peak is not right"
        )
    return matmul_seconds / measured_seconds


@dataclass(frozen=True)
class _PointModel:
    """The costs of one profile point on one accelerator. Properties are times of a forward pass."""

    model: ModelShape
    accelerator: Accelerator
    point: Point
    efficiency: float
    element_bytes: int

    @property
    def tokens(self) -> int:
        return self.point.micro_batch * self.point.seq_length

    @property
    def _attention_flops(self) -> float:
        per_sample = self.model.attention_flops_of(self.point.seq_length)
        return self.point.micro_batch * per_sample / self.point.tensor

    @property
    def products(self) -> PassTimes:
        """Of a dense layer's matrices and attention, in both passes without recomputation."""
        return self._products(self.model.layer_matrix_parameters)

    def _products(self, matrices: float, *, sparse: bool = False) -> PassTimes:
        """The same of a layer whose matrices have `matrices` weights on all ranks together; of a
        `sparse` one with its experts."""
        each = 2.0 * self.tokens / self.point.tensor
        in_fp8 = linear_parameters(self.model, sparse=sparse) if self._is_fp8 else 0
        others = self._seconds(each * (matrices - in_fp8) + self._attention_flops)
        linear = self._in_fp8(each * in_fp8, weight_gradients=self.point.fp8_weight_gradients)
        forward, backward = linear.forward + others, linear.backward + 2 * others
        if sparse:
            flops = each / 2 * self.model.expert_flops / self.model.seq_length
            experts = PassTimes(self._seconds(flops), 2 * self._seconds(flops))
            if self._experts_in_fp8:
                experts = self._in_fp8(flops, weight_gradients=False)
            forward, backward = forward + experts.forward, backward + experts.backward
        return PassTimes(forward, backward)

    def _in_fp8(self, flops: float, *, weight_gradients: bool) -> PassTimes:
        """Of products whose forward pass has `flops` FLOPs."""
        part, in_bf16 = self.accelerator, self._seconds(flops)
        quick = in_bf16 * part.matmul_flops / part.fp8_matmul_flops
        return PassTimes(quick, quick + (quick if weight_gradients else in_bf16))

    @property
    def _is_fp8(self) -> bool:
        return self.point.fp8 != NO_FP8

    @property
    def _experts_in_fp8(self) -> bool:
        return self._is_fp8 and self.accelerator.has_fp8_grouped_mm

    def _fp8_layer(self, *, sparse: bool) -> Fp8Layer:
        return Fp8Layer(
            model=self.model,
            recipe=self.point.fp8,
            weight_gradients=self.point.fp8_weight_gradients,
            tensor=self.point.tensor,
            sequence_parallel=self.point.sequence_parallel,
            sparse=sparse,
            experts=self._experts_in_fp8,
        )

    @property
    def casts(self) -> PassTimes:
        """Of a dense layer's inputs and output gradients, in both passes with recomputation."""
        return self._casts(sparse=False)

    def _casts(self, *, sparse: bool) -> PassTimes:
        if not self._is_fp8:
            return PassTimes(0.0, 0.0)
        layer, again = self._fp8_layer(sparse=sparse), self.point.recompute == "full"
        forward = layer.forward_cast_bytes(keeps=not again)
        backward = layer.backward_cast_bytes
        if again:
            backward += layer.forward_cast_bytes(keeps=True)
        each = self.tokens / self.accelerator.memory_bandwidth
        return PassTimes(forward * each, backward * each)

    @property
    def memory_bound_seconds(self) -> float:
        """Norms, residuals, rotary embedding and activation function: bytes read and written."""
        model, tensor = self.model, self.point.tensor
        unsharded = 10 * model.hidden / (tensor if self.point.sequence_parallel else 1)
        mlp = (3 if model.gated else 2) * model.ffn
        rotary = 2 * (model.attention_width + model.key_width)
        moved_bytes = self.tokens * (unsharded + (mlp + rotary) / tensor) * self.element_bytes
        return moved_bytes / self.accelerator.memory_bandwidth

    @property
    def all_reduce_seconds(self) -> float:
        """Two all-reduces of the hidden state, each a reduce-scatter and an all-gather."""
        link = link_inside_node(self.accelerator)
        size = self.tokens * self.model.hidden * self.element_bytes
        return 4 * ring_seconds(link, ranks=self.point.tensor, size=size)

    def costs(self) -> PartCosts:
        activation_bytes, working_bytes = self._activations(self._mlp_width)
        costs = PartCosts(
            layer=self._passes(
                self.products, self.casts, self.memory_bound_seconds, self.all_reduce_seconds
            ),
            embedding=self._embedding(),
            head=self._head(),
            layer_activation_bytes=activation_bytes,
            embedding_activation_bytes=self._hidden_bytes,
            head_activation_bytes=self._logits * (self.element_bytes + 4) + 2 * self._hidden_bytes,
            head_passing_bytes=self._logits * self.element_bytes,
            layer_working_bytes=working_bytes,
            layer_delayed_bytes=self._delayed_of(self.model.ffn, sparse=False),
            head_delayed_bytes=(self._logits + self.tokens * self.model.hidden)
            * self.element_bytes,
        )
        return self._with_experts(costs) if self.model.num_experts else costs

    def _passes(
        self, products: PassTimes, casts: PassTimes, memory_bound: float, all_reduce: float
    ) -> PassTimes:
        """Of a layer; the last two are of its forward pass."""
        forward = products.forward + memory_bound + all_reduce
        backward = products.backward + 2 * memory_bound + all_reduce
        if self.point.recompute == "full":
            backward += forward
        elif self.point.recompute == "selective":
            backward += self._seconds(self._attention_flops)
        return PassTimes(forward + casts.forward, backward + casts.backward)

    def _with_experts(self, costs: PartCosts) -> PartCosts:
        """Add what a sparse layer costs. Matrices, norms and attention are those of a dense one."""
        model, tensor, element = self.model, self.point.tensor, self.element_bytes
        # Rows are put in the order of experts and back, and weighed: each read and written.
        rows = self.tokens * model.experts_per_token * 4 * model.hidden / tensor
        widths = self._mlp_widths * (model.experts_per_token * model.expert_ffn + model.shared_ffn)
        moved = self.memory_bound_seconds
        more = rows + self.tokens * (widths - self._mlp_width) / tensor
        moved += more * element / self.accelerator.memory_bandwidth
        moved *= _SPARSE_TRAFFIC
        # Of the two all-reduces of a dense layer, attention's and the shared experts'.
        all_reduces = self.all_reduce_seconds * (1.0 if model.shared_ffn else 0.5)
        activation_bytes, working_bytes = self._activations(
            self._mlp_widths * model.shared_ffn, experts=True
        )
        delayed = self._delayed_of(model.shared_ffn, sparse=True)
        rows_of_experts = self.tokens * model.experts_per_token * element
        delayed += rows_of_experts * 2 * model.hidden
        delayed += rows_of_experts * self._mlp_widths * model.expert_ffn / tensor
        return replace(
            costs,
            sparse_layer=self._passes(
                self._products(model.sparse_matrix_parameters, sparse=True),
                self._casts(sparse=True),
                moved,
                all_reduces,
            ),
            sparse_layer_activation_bytes=activation_bytes,
            sparse_layer_working_bytes=working_bytes,
            sparse_layer_delayed_bytes=delayed,
            experts_at_least=self._experts_at_least(),
            sparse_layer_at_least=self._recomputed(_SPARSE_LAYER_HOST),
        )

    def _experts_at_least(self) -> PassTimes:
        """Of all experts: their weights from memory, or the host that starts one after the other
        where the accelerator does not compute all at once."""
        weights = self.model.expert_parameters / self.point.tensor
        seconds = weights / self.accelerator.memory_bandwidth
        element = 1 if self._experts_in_fp8 else self.element_bytes
        read, added = seconds * element, seconds * _GRADIENT_BYTES
        memory = self._recomputed(PassTimes(read, read + added))
        if self.accelerator.has_grouped_mm or self._experts_in_fp8:
            return memory
        each = self.model.num_experts * _EXPERT_SECONDS
        start = self._recomputed(PassTimes(each, each))
        return PassTimes(max(memory.forward, start.forward), max(memory.backward, start.backward))

    def _recomputed(self, passes: PassTimes) -> PassTimes:
        """With the forward pass once more in the backward pass, where layers are recomputed."""
        if self.point.recompute != "full":
            return passes
        return PassTimes(passes.forward, passes.backward + passes.forward)

    @property
    def _mlp_widths(self) -> int:
        """Rows of activations that an MLP of width 1 keeps: inputs of the activation and output."""
        return 3 if self.model.gated else 2

    @property
    def _mlp_width(self) -> int:
        return self._mlp_widths * self.model.ffn

    def _seconds(self, flops: float) -> float:
        return flops / (self.accelerator.matmul_flops * self.efficiency)

    @property
    def _logits(self) -> float:
        return self.tokens * self.model.vocabulary / self.point.tensor

    @property
    def _hidden_bytes(self) -> float:
        """One rank's part of a hidden state."""
        shards = self.point.tensor if self.point.sequence_parallel else 1
        return self.tokens * self.model.hidden * self.element_bytes / shards

    def _embedding(self) -> PassTimes:
        size = self.tokens * self.model.hidden * self.element_bytes
        lookup = 2 * size / self.accelerator.memory_bandwidth
        link = link_inside_node(self.accelerator)
        all_reduce = 2 * ring_seconds(link, ranks=self.point.tensor, size=size)
        return PassTimes(lookup + all_reduce, 2 * lookup)

    def _head(self) -> PassTimes:
        """The output layer and the loss, which reads and writes the fp32 logits twice a pass."""
        flops = self.point.micro_batch * self.model.head_flops / self.model.seq_length
        matmul = self._seconds(flops * self.point.seq_length / self.point.tensor)
        loss = self._logits * 4 * 4 / self.accelerator.memory_bandwidth
        return PassTimes(matmul + loss, 2 * matmul + loss)

    def _delayed_of(self, ffn: int, *, sparse: bool) -> float:
        """What delayed weight gradients keep: inputs and output gradients of the four matrices.

        Those of hidden size are counted whole: with sequence parallelism they are gathered.
        """
        model = self.model
        inputs = model.output_width + model.latent_width + ffn
        outputs = model.attention_width + model.projected_width + model.latent_width
        outputs += (2 if model.gated else 1) * ffn
        element = self.element_bytes
        if self._is_fp8:
            element = self._fp8_layer(sparse=sparse).delayed_element_bytes
        return self.tokens * (4 * model.hidden + (inputs + outputs) / self.point.tensor) * element

    def _activations(self, mlp: int, *, experts: bool = False) -> tuple[float, float]:
        """Bytes that a layer keeps for its backward pass, and that pass's temporary bytes.

        `mlp` are the elements that its MLP, or its shared experts, keep for each token, and
        `experts` says whether it has others, too.

        Korthikanti et al. (arXiv 2205.05198), section 4, without dropout, extended to grouped
        queries and gated MLPs. Attention is fused: it keeps no scores, so selective recomputation
        saves nothing.
        """
        model, tensor = self.model, self.point.tensor
        attention = model.attention_width + model.output_width + model.projected_width
        if model.latent is not None:
            # Latent vectors before and after their norms, and keys put together of two parts.
            attention += 2 * model.latent_width + model.key_width
        sharded = self.tokens * (attention + mlp) / tensor * self.element_bytes
        statistics = self.tokens * model.heads / tensor * 4
        kept = 4 * self._hidden_bytes + sharded + statistics
        gradients = self.tokens * mlp / tensor * self.element_bytes
        if self._is_fp8:
            layer = self._fp8_layer(sparse=experts)
            kept += self.tokens * layer.more_kept_bytes
            gradients += self.tokens * layer.temporary_bytes
        if experts:
            routed, temporary = self._activations_of_experts()
            kept, gradients = kept + routed, gradients + temporary
        if self.point.recompute == "full":
            return self._hidden_bytes, kept + gradients
        return kept, gradients

    def _activations_of_experts(self) -> tuple[float, float]:
        """The same of experts: inputs and what their MLPs keep, and scores of the router.

        The ranks that share an expert gather its tokens.
        """
        model, tensor = self.model, self.point.tensor
        rows = self.tokens * model.experts_per_token * self.element_bytes
        inputs, mlp = rows * model.hidden, rows * self._mlp_widths * model.expert_ffn / tensor
        scores = self.tokens / tensor * model.num_experts * _SCORE_BYTES
        return inputs + mlp + scores, 2 * inputs + mlp
