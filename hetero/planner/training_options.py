"""Training options that costs depend on: bytes per parameter, overlap of communication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetero.planner.fp8 import BF16, Fp8


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
    expert_dispatcher: str = "allgather"
    """How tokens reach the ranks of their experts: "allgather", as in Megatron, or "alltoall"."""
    expert_imbalance: float = 1.2
    """Tokens of the busiest expert-parallel rank, in parts of the mean. All others wait for it."""
    recomputes_mtp_layers: bool = True
    """Whether MTP layers are recomputed where layers are: `--recompute-method block` recomputes
    none of them."""
    fp8: Fp8 = BF16
    """Of meshes that say nothing else."""
    reserved_bytes: float = 1.5 * 2**30
    """Memory of each GPU that is not available to the model: driver context, libraries."""

    @classmethod
    def of_flags(cls, flags: Mapping[str, Any]) -> TrainingOptions:
        """What Megatron's flags say. Names have no leading dashes."""
        given = {name.replace("_", "-"): value for name, value in flags.items()}
        in_half = bool(given.get("bf16") or given.get("fp16"))
        weight = 2 if in_half else 4
        sums_in_fp32 = given.get("bf16") and not given.get("grad-reduce-in-bf16")
        return cls(
            activation_bytes=weight,
            parameter_bytes=weight,
            gradient_bytes=4 if sums_in_fp32 else weight,
            state_bytes=12 if in_half else 8,
            delay_weight_gradients=bool(given.get("delay-wgrad-compute")),
            expert_dispatcher=dispatcher_of(given),
            recomputes_mtp_layers=recomputes_mtp_layers(given),
            fp8=Fp8.of_flags(given),
        )


def recomputes_mtp_layers(flags: Mapping[str, Any]) -> bool:
    """What Megatron's flags say of it. Names have no leading dashes."""
    return flags.get("recompute-method") != "block"


def dispatcher_of(flags: Mapping[str, Any]) -> str:
    """What Megatron's flags say of `expert_dispatcher`. Names have no leading dashes."""
    kind = str(flags.get("moe-token-dispatcher-type") or "allgather")
    return "alltoall" if kind == "flex" else kind
