"""A profile of hardware that nobody has measured yet, from what its vendor publishes.

Matrices and attention take their operations at a part of the accelerator's peak; the rest of a
layer takes the bytes it moves at the memory's bandwidth; tensor-parallel ranks exchange over the
node's links. The part of the peak comes from one part that was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetero.planner.accelerators import Accelerator
from hetero.planner.cluster_shape import Cluster, Wire
from hetero.planner.layer_profile import MeasuredProfile, PartCosts, PassTimes, Point, ProfileError
from hetero.planner.model_shape import ModelShape
from hetero.planner.wire_costs import ring_seconds

EFFICIENCY = 0.63
"""Of the peak, for matrices and attention: what makes LLaMA-8B take the 571.6 TFLOP/s measured on
H200 (docs/benchmarks/published_table.md)."""
_ELEMENT = 2
"""Bytes of a bf16 element."""
_UPDATE_BYTES = 42
"""Of a parameter, that an optimizer step reads and writes: gradient twice (its norm, its use) and
zeroed, fp32 weight and two moments read and written, bf16 weight written."""
_REDUCTION_BYTES = 20
"""Of a parameter: its fp32 gradient scaled in place, then read with another's and written."""


@dataclass(frozen=True)
class AnalyticProfile:
    """A `Profile` computed from published figures, for any point."""

    model: ModelShape
    accelerators: Mapping[str, Accelerator]
    efficiency: float = EFFICIENCY

    def costs(self, accelerator: str, point: Point) -> PartCosts:
        return _Layer(self.model, self._of(accelerator), point, self.efficiency).costs()

    def optimizer_seconds(self, accelerator: str, parameters: float) -> float:
        return parameters * _UPDATE_BYTES / self._of(accelerator).memory_bandwidth

    def reduction_seconds(self, accelerator: str, parameters: float) -> float:
        return parameters * _REDUCTION_BYTES / self._of(accelerator).memory_bandwidth

    def _of(self, accelerator: str) -> Accelerator:
        try:
            return self.accelerators[accelerator]
        except KeyError:
            raise ProfileError(
                f"the profile has no {accelerator}; it has {', '.join(self.accelerators)}"
            ) from None


def analytic_profile(
    model: ModelShape, cluster: Cluster, *, efficiency: float = EFFICIENCY
) -> AnalyticProfile:
    """For every accelerator of a cluster."""
    parts = {kind.accelerator.name: kind.accelerator for kind in cluster.kinds}
    return AnalyticProfile(model, parts, efficiency)


def measured_efficiency(
    measured: MeasuredProfile, accelerator: Accelerator, model: ModelShape
) -> float:
    """The part of its peak that a measured accelerator reached, over all points of its profile."""
    known = measured.accelerators.get(accelerator.name)
    if known is None:
        raise ProfileError(
            f"the profile to calibrate with has no {accelerator.name}; it has "
            f"{', '.join(measured.accelerators)}"
        )
    computing = at_peak = 0.0
    for point, costs in known.points.items():
        layer = _Layer(model, accelerator, point, 1.0)
        rest = layer.moving * 3 + layer.exchanging * 2
        if point.recompute == "full":
            rest += layer.moving + layer.exchanging
        computing += max(costs.layer.forward + costs.layer.backward - rest, 0.0)
        at_peak += layer.computing * (4 if point.recompute == "full" else 3)
    if not computing > at_peak:
        raise ProfileError(
            f"the profile of {accelerator.name} is faster than its peak allows; it was measured "
            "with another model, or the peak is not right"
        )
    return at_peak / computing


@dataclass(frozen=True)
class _Layer:
    """One point on one accelerator. Times are of a forward pass."""

    model: ModelShape
    part: Accelerator
    point: Point
    efficiency: float

    @property
    def tokens(self) -> int:
        return self.point.micro_batch * self.point.seq_length

    @property
    def _attention_flops(self) -> float:
        per_sample = 2.0 * self.point.seq_length**2 * self.model.attention_width
        return self.point.micro_batch * per_sample / self.point.tensor

    @property
    def computing(self) -> float:
        matrices = 2.0 * self.tokens * self.model.layer_matrix_parameters / self.point.tensor
        return self._seconds(matrices + self._attention_flops)

    @property
    def moving(self) -> float:
        """Norms, residuals and the activation function, each reading and writing what it is on."""
        model, tensor = self.model, self.point.tensor
        whole = 10 * model.hidden / (tensor if self.point.sequence_parallel else 1)
        mlp = (3 if model.gated else 2) * model.ffn
        rotary = 2 * (model.attention_width + model.key_value_width)
        moved = self.tokens * (whole + (mlp + rotary) / tensor) * _ELEMENT
        return moved / self.part.memory_bandwidth

    @property
    def exchanging(self) -> float:
        """Two all-reduces of the hidden state, or with sequence parallelism their two halves."""
        wire = Wire(self.part.link_bandwidth, self.part.link_latency)
        size = self.tokens * self.model.hidden * _ELEMENT
        return 4 * ring_seconds(wire, ranks=self.point.tensor, size=size)

    def costs(self) -> PartCosts:
        forward = self.computing + self.moving + self.exchanging
        backward = 2 * (self.computing + self.moving) + self.exchanging
        if self.point.recompute == "full":
            backward += forward
        elif self.point.recompute == "selective":
            backward += self._seconds(self._attention_flops)
        kept, working = self._activations()
        return PartCosts(
            layer=PassTimes(forward, backward),
            embedding=self._embedding(),
            head=self._head(),
            layer_activation_bytes=kept,
            embedding_activation_bytes=self._hidden_bytes,
            head_activation_bytes=self._logits * (_ELEMENT + 4) + 2 * self._hidden_bytes,
            layer_working_bytes=working,
            layer_delayed_bytes=self._delayed,
            head_delayed_bytes=(self._logits + self.tokens * self.model.hidden) * _ELEMENT,
        )

    def _seconds(self, flops: float) -> float:
        return flops / (self.part.flops * self.efficiency)

    @property
    def _logits(self) -> float:
        return self.tokens * self.model.vocabulary / self.point.tensor

    @property
    def _hidden_bytes(self) -> float:
        """Of one hidden state, as one rank holds it."""
        shared = self.point.tensor if self.point.sequence_parallel else 1
        return self.tokens * self.model.hidden * _ELEMENT / shared

    def _embedding(self) -> PassTimes:
        moved = 2 * self.tokens * self.model.hidden * _ELEMENT / self.part.memory_bandwidth
        wire = Wire(self.part.link_bandwidth, self.part.link_latency)
        size = self.tokens * self.model.hidden * _ELEMENT
        exchanged = 2 * ring_seconds(wire, ranks=self.point.tensor, size=size)
        return PassTimes(moved + exchanged, 2 * moved)

    def _head(self) -> PassTimes:
        """The output layer, and a loss that reads and writes the logits in fp32 twice a pass."""
        flops = self.point.micro_batch * self.model.head_flops / self.model.seq_length
        computed = self._seconds(flops * self.point.seq_length / self.point.tensor)
        moved = self._logits * 4 * 4 / self.part.memory_bandwidth
        return PassTimes(computed + moved, 2 * computed + moved)

    @property
    def _delayed(self) -> float:
        """Of the four matrices, the inputs and the gradients of the outputs.

        With sequence parallelism, too, those that are of the whole hidden state are gathered.
        """
        model = self.model
        inputs = model.attention_width + model.ffn
        outputs = model.attention_width + 2 * model.key_value_width
        outputs += (2 if model.gated else 1) * model.ffn
        return self.tokens * (4 * model.hidden + (inputs + outputs) / self.point.tensor) * _ELEMENT

    def _activations(self) -> tuple[float, float]:
        """Bytes that a layer keeps, and those it takes for a while in its backward pass.

        Section 4 of arXiv 2205.05198 without dropout, for fused attention (which keeps no scores,
        so that recomputing it selectively saves nothing), any width of keys and a gated MLP.
        """
        model, tensor = self.model, self.point.tensor
        attention = 2 * model.attention_width + 2 * model.key_value_width
        mlp = (3 if model.gated else 2) * model.ffn
        inner = self.tokens * (attention + mlp) / tensor * _ELEMENT
        statistics = self.tokens * model.heads / tensor * 4
        whole = 4 * self._hidden_bytes + inner + statistics
        gradients = self.tokens * mlp / tensor * _ELEMENT
        if self.point.recompute == "full":
            return self._hidden_bytes, whole + gradients
        return whole, gradients
