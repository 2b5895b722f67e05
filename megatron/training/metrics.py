"""The numbers of a run: floating-point operations, memory, and the record of one iteration.

The formulas are explained in docs/metrics.md.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch


def model_flops_per_token(args: argparse.Namespace, *, full_square: bool = False) -> float:
    """Operations of one forward and backward pass, per token.

    Every matrix product of the forward pass counts two operations per multiply-add and the backward
    pass twice the forward. Causal attention counts half of the score matrix, once; with
    `full_square` all of it, as Megatron-LM's own log does. Recomputation is not counted: it is work
    the model does not need.
    """
    hidden, layers, sequence = args.hidden_size, args.num_layers, args.seq_length
    queries = args.num_attention_heads * args.kv_channels
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    keys = groups * args.kv_channels
    projections = hidden * (queries + 2 * keys) + queries * hidden
    mlp = (3 if args.swiglu else 2) * hidden * args.ffn_hidden_size
    attention = 2 * queries * (sequence if full_square else sequence / 2)
    head = hidden * args.padded_vocab_size
    forward = 2 * (layers * (projections + mlp + attention) + head)
    return 3.0 * forward


def tflops_per_gpu(
    args: argparse.Namespace, *, tokens: float, seconds: float, full_square: bool = False
) -> float:
    operations = model_flops_per_token(args, full_square=full_square) * tokens
    return operations / seconds / args.world_size / 1e12


def planned_state_bytes(parameters: int, *, args: argparse.Namespace, data_size: int) -> int:
    """Bytes of weights, gradients and optimizer state of a rank, before any activation.

    Gradients are accumulated in one buffer, fp32 where asked. Adam keeps two moments in fp32, SGD
    one momentum if it has any, and reduced-precision weights a fp32 copy; the distributed optimizer
    shares all of these over the data-parallel ranks.
    """
    weight = 4 if args.params_dtype == "float32" else 2
    gradient = 4 if args.accumulate_allreduce_grads_in_fp32 else weight
    moments = 8 if args.optimizer == "adam" else (4 if args.sgd_momentum else 0)
    state = moments + (4 if weight == 2 else 0)
    shared = data_size if args.use_distributed_optimizer else 1
    return parameters * (weight + gradient) + parameters * state // shared


def measured_peak_bytes(device: torch.device) -> int:
    """Peak memory so far: the allocator's on a GPU, the process's resident set on CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def device_used_bytes(device: torch.device) -> int:
    """What the driver counts as used on a GPU, other processes and libraries included."""
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


@dataclass
class DataWaits:
    """How long one rank stood still until its loader had a micro-batch, in seconds.

    The first iteration is kept apart: it also starts the loader.
    """

    first: float | None = None
    later: float = 0.0
    longest_later: float = 0.0
    """The longest of one iteration."""
    later_iterations: int = 0

    def add(self, seconds: float) -> None:
        """Count one iteration."""
        if self.first is None:
            self.first = seconds
            return
        self.later += seconds
        self.longest_later = max(self.longest_later, seconds)
        self.later_iterations += 1

    def as_json(self) -> dict[str, float]:
        return {
            "first_iteration_seconds": self.first or 0.0,
            "later_seconds": self.later,
            "longest_later_seconds": self.longest_later,
            "later_iterations": self.later_iterations,
        }


@dataclass(frozen=True)
class IterationRecord:
    """One line of `--metrics-file`."""

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    elapsed_ms: float
    tokens_per_s: float
    tflops_per_gpu: float
    tflops_per_gpu_full_square: float
    """The same time with attention counted as a full square, for comparison with other logs."""
    loss: float
    grad_norm: float | None
    learning_rate: float
    weight_decay: float
    batch_size: int
    loss_scale: float
    skipped: bool
    num_zeros: float | None
    params_norm: float | None
    peak_memory_bytes: int
    """Rank 0's."""
    data_wait_ms: float
    """Time for which rank 0 stood still until the loader had a micro-batch, in this iteration."""
    link_bytes: int
    """Tensor bytes sent so far over links that cross a boundary, all ranks together."""
    simulated: bool

    def as_json(self) -> dict[str, Any]:
        """The record with null for what is not finite, which JSON cannot say."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }
