"""Metrics of a run: FLOPs, memory, and the record of one iteration.

docs/metrics.md explains the formulas.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch


def model_flops_per_token(args: argparse.Namespace, *, full_square: bool = False) -> float:
    """FLOPs of one forward and backward pass, per token.

    A multiply-add of a matrix product counts as two, the backward pass as twice the forward. Causal
    attention counts half of the score matrix, as in Megatron-LM's log; with `full_square` all of
    it. Recomputation is not counted.
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
    """Expected bytes of weights, gradients and optimizer state of a rank, without activations.

    Adam keeps two fp32 moments, SGD one if it uses momentum, and reduced-precision weights have an
    fp32 copy. The distributed optimizer shards this state over the data-parallel ranks.
    """
    weight = 4 if args.params_dtype == "float32" else 2
    gradient = 4 if args.accumulate_allreduce_grads_in_fp32 else weight
    moments = 8 if args.optimizer == "adam" else (4 if args.sgd_momentum else 0)
    state = moments + (4 if weight == 2 else 0)
    shared = data_size if args.use_distributed_optimizer else 1
    return parameters * (weight + gradient) + parameters * state // shared


def measured_peak_bytes(device: torch.device) -> int:
    """Peak memory so far: torch's allocator on a GPU, the resident set size on CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def device_used_bytes(device: torch.device) -> int:
    """Memory in use on a GPU according to the driver, including other processes and libraries."""
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


@dataclass
class DataWaitTimes:
    """Seconds for which one rank was blocked on its data loader.

    The first iteration is separate: it includes starting the loader's workers.
    """

    first: float | None = None
    later: float = 0.0
    longest_later: float = 0.0
    """Maximum over iterations."""
    later_iterations: int = 0

    def add(self, seconds: float) -> None:
        """Add the wait of one iteration."""
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
    """With attention counted as a full square, as Megatron-LM's log did up to core 0.11."""
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
    """Time for which rank 0 was blocked on its data loader in this iteration."""
    link_bytes: int
    """Tensor bytes sent so far over links that cross a boundary, summed over all ranks."""
    simulated: bool

    def as_json(self) -> dict[str, Any]:
        """The record, with None for values that are not finite, which JSON cannot represent."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }
