"""--hetero-data-shares auto: shares in proportion to the measured speed of each replica."""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from megatron.hetero.arguments.batch import batch_sizes
from megatron.hetero.checkpoint.rank_state import (
    restore_rng_state,
    rng_prefix,
    rng_write_items,
)
from megatron.hetero.data import build_data_iterators
from megatron.hetero.experts import kept_counts
from megatron.hetero.job import Job
from megatron.hetero.model import StageModel
from megatron.hetero.schedule import Schedule
from megatron.hetero.timers import Timers, clock_of

_WARMUP_STEPS, _MEASURED_STEPS = 2, 5
_MAX_MICRO_BATCHES = 8
"""Micro-batches of one replica in one measured step."""
_TOLERANCE = 0.03
"""Keep equal shares unless others shorten a step by at least this fraction."""


def measure_data_shares(job: Job, model: StageModel) -> tuple[Job, str]:
    """Measure each replica; returns the job with the resulting shares, and a line for the log.

    Every replica runs the same few micro-batches forward and backward, without gradient reduction.
    Weights, the bias of experts, RNG states and the order of the training data do not change.
    Collective over all ranks.
    """
    seconds = _seconds_per_micro_batch(job, model)
    rows = job.statistics.gather([seconds])
    meshes = job.plan.meshes
    mesh_seconds = [0.0] * len(meshes)
    for rank, (rank_seconds, *_) in enumerate(rows):
        mesh = job.plan.coordinate(rank).mesh
        # All replicas of a mesh have the same share, so its slowest rank counts.
        mesh_seconds[mesh] = max(mesh_seconds[mesh], float(rank_seconds))
    replicas = [mesh.data for mesh in meshes]
    shares = best_shares(common_micro_batches(job.args), replicas, mesh_seconds)
    job.args.hetero_data_shares = shares
    job.args.data_shares = tuple(
        share for mesh, share in zip(meshes, shares, strict=True) for _ in range(mesh.data)
    )
    shared = tuple(replace(mesh, share=share) for mesh, share in zip(meshes, shares, strict=True))
    each = ", ".join(
        f"{mesh.vendor} {cost * 1000:.1f} ms"
        for mesh, cost in zip(meshes, mesh_seconds, strict=True)
    )
    line = (
        f"a micro batch takes a replica of {each}: --hetero-data-shares "
        f"{','.join(map(str, shares))}"
    )
    return replace(job, plan=replace(job.plan, meshes=shared)), line


def common_micro_batches(args: argparse.Namespace) -> int:
    """GCD of the micro-batches per global batch, over all batch sizes and evaluation."""
    counts = [size // args.micro_batch_size for size in batch_sizes(args)]
    if args.eval_iters:
        counts.append(args.eval_global_batch_size // args.eval_micro_batch_size)
    return math.gcd(*counts)


def best_shares(row: int, replicas: Sequence[int], seconds: Sequence[float]) -> tuple[int, ...]:
    """Micro-batches per replica of each mesh, in lowest terms, that minimise the step time.

    Args:
        row: micro-batches of all replicas together; a multiple of the number of replicas.
        replicas: number of replicas of each mesh.
        seconds: time of one micro-batch on a replica of each mesh.
    """

    def step_seconds(shares: Sequence[int]) -> float:
        return max(share * cost for share, cost in zip(shares, seconds, strict=True))

    equal = (row // sum(replicas),) * len(replicas)
    best = min(_splits(row, replicas), key=step_seconds)
    chosen = best if step_seconds(best) < (1 - _TOLERANCE) * step_seconds(equal) else equal
    divisor = math.gcd(*chosen)
    return tuple(share // divisor for share in chosen)


def _splits(row: int, replicas: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All shares, at least one micro-batch per replica, that add up to `row` over all replicas."""
    first, *others = replicas
    if not others:
        if row >= first and row % first == 0:
            yield (row // first,)
        return
    for share in range(1, row // first + 1):
        for rest in _splits(row - first * share, others):
            yield (share, *rest)


def _seconds_per_micro_batch(job: Job, model: StageModel) -> float:
    """Median time of one micro-batch of this rank's replica."""
    args = job.args
    count = min(_MAX_MICRO_BATCHES, common_micro_batches(args) // job.plan.row(0))
    batches = build_data_iterators(
        args,
        job.datasets.train,
        coordinate=job.coordinate,
        plan=job.plan,
        consumed=0,
        device=job.device,
    )
    # Repeat one batch, so that data loading is not measured.
    repeated: list[Iterator[Any]] = [itertools.repeat(next(one)) for one in batches]
    schedule = Schedule(job, model, Timers(level=0, clock=clock_of(job.device)))
    measured = []
    with closing(schedule), _preserved_state(job, model):
        for _ in range(_WARMUP_STEPS + _MEASURED_STEPS):
            _synchronize(job.device)
            began = time.perf_counter()
            schedule.run(
                repeated,
                batch_size=args.micro_batch_size * job.plan.row(0) * count,
                micro_batch_size=args.micro_batch_size,
            )
            _synchronize(job.device)
            measured.append((time.perf_counter() - began) / count)
    return statistics.median(measured[_WARMUP_STEPS:])


@contextmanager
def _preserved_state(job: Job, model: StageModel) -> Iterator[None]:
    """Disable gradient reduction in the body; restores all that passes change afterwards.

    That are gradients, RNG states and what routers count for the bias of experts.
    """
    config: Any = model.config
    overrides = {
        "finalize_model_grads_func": None,
        "grad_sync_func": None,
        "no_sync_func": nullcontext,
    }
    before = {name: getattr(config, name) for name in overrides}
    prefix = rng_prefix(job.coordinate)
    random = {p.name.removeprefix(prefix): p.source() for p in rng_write_items(job.coordinate)}
    with ExitStack() as stack, kept_counts(model.chunks):
        for chunk in model.chunks:
            stack.enter_context(chunk.no_sync())
            stack.callback(chunk.zero_grad_buffer)
        for name, function in overrides.items():
            setattr(config, name, function)
        try:
            yield
        finally:
            for name, function in before.items():
                setattr(config, name, function)
            restore_rng_state(random)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
