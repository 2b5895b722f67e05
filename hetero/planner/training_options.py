"""Training options that costs depend on: bytes per parameter, overlap of communication."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How a run trains. Defaults: Megatron's bf16 mixed precision with Adam."""

    activation_bytes: int = 2
    """Bytes per element of what stages exchange."""
    parameter_bytes: int = 2
    """Bytes per weight in the forward pass."""
    gradient_bytes: int = 4
    """Bytes per element of the gradient buffer, which data-parallel ranks reduce."""
    state_bytes: int = 12
    """Bytes of optimizer state per parameter: an fp32 copy and two moments."""
    overlap_grad_reduce: bool = False
    """Whether gradient reduction overlaps the backward pass of earlier layers."""
    overlap_param_gather: bool = False
    """Whether the all-gather of updated weights overlaps the next forward pass."""
    delay_weight_gradients: bool = False
    """Whether a stage computes them after sending the gradient of its input."""
    deepspeed_transfers: bool = False
    """Whether stages communicate as in DeepSpeed's pipeline engine, to compare with runs of it:
    sharded activations that receivers all-gather, and blocking sends of what NCCL cannot buffer."""
    reserved_bytes: float = 1.5 * 2**30
    """Memory of each GPU that is not available to the model: driver context, libraries."""
