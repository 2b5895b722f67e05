"""What costs depend on beside plan, cluster and model: bytes of a parameter, and what overlaps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How a run trains. The defaults are bf16 mixed precision with Adam, as Megatron does it."""

    activation_bytes: int = 2
    """Of an element that stages exchange."""
    parameter_bytes: int = 2
    """Of a weight that the forward pass reads."""
    gradient_bytes: int = 4
    """Of an element of the gradient buffer, which is what data-parallel ranks reduce."""
    state_bytes: int = 12
    """Of a parameter's optimizer state: an fp32 copy and two moments."""
    overlap_grad_reduce: bool = False
    """Whether a layer's gradients are reduced while backward goes on through the layers before."""
    overlap_param_gather: bool = False
    """Whether updated weights are gathered while the next forward pass goes on."""
    delay_weight_gradients: bool = False
    """Whether a stage computes them after it has sent the gradient of its input."""
    deepspeed_transfers: bool = False
    """Whether stages exchange as DeepSpeed's pipeline engine does, for comparing with runs of it:
    in parts that the receivers gather, in its order, and a sender of more than NCCL buffers waits.
    """
    reserved_bytes: float = 1.5 * 2**30
    """Of each GPU, for what no model holds: the driver's context and what libraries keep."""
