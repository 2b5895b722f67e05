"""--hetero-data-shares auto: shares that follow from what a micro-batch costs each replica."""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from megatron.training.arguments.batch_sizes import batch_sizes
from megatron.training.checkpoint.contents import (
    random_pieces,
    random_prefix,
    restore_random,
)
from megatron.training.data import chunk_iterators
from megatron.training.job import Job
from megatron.training.model import StageModel
from megatron.training.schedule import Schedule
from megatron.training.timing.clocks import clock_of
from megatron.training.timing.timers import Timers

_WARM_UP, _STEPS = 2, 5
_MOST_MICRO_BATCHES = 8
"""Of one replica in one measured step."""
_TOLERANCE = 0.03
"""Equal shares stay where others would shorten a step by less than this part of it."""


def measure_shares(job: Job, model: StageModel) -> tuple[Job, str]:
    """The job with shares for the speeds that are measured here, and a line about them.

    Every replica computes the same few micro-batches, forward and backward, and exchanges nothing
    with another replica. Weights, random states and the training data's order are left as they
    were. Collective over all ranks.
    """
    seconds = _seconds_per_micro_batch(job, model)
    rows = job.statistics.gather(torch.tensor([seconds], dtype=torch.float64))
    meshes = job.plan.meshes
    costs = [0.0] * len(meshes)
    for rank, (told, *_) in enumerate(rows):
        mesh = job.plan.coordinate(rank).mesh
        # The replicas of a mesh have one share, so that its slowest rank decides.
        costs[mesh] = max(costs[mesh], float(told))
    shares = best_shares(micro_batches_of_a_row(job.args), [mesh.data for mesh in meshes], costs)
    job.args.hetero_data_shares = shares
    job.args.data_shares = tuple(
        share for mesh, share in zip(meshes, shares, strict=True) for _ in range(mesh.data)
    )
    shared = tuple(replace(mesh, share=share) for mesh, share in zip(meshes, shares, strict=True))
    each = ", ".join(
        f"{mesh.vendor} {cost * 1000:.1f} ms" for mesh, cost in zip(meshes, costs, strict=True)
    )
    line = (
        f"a micro batch takes a replica of {each}: --hetero-data-shares "
        f"{','.join(map(str, shares))}"
    )
    return replace(job, plan=replace(job.plan, meshes=shared)), line


def micro_batches_of_a_row(args: argparse.Namespace) -> int:
    """The most micro-batches that every global batch, in evaluation too, is a multiple of."""
    counts = [size // args.micro_batch_size for size in batch_sizes(args)]
    if args.eval_iters:
        counts.append(args.eval_global_batch_size // args.eval_micro_batch_size)
    return math.gcd(*counts)


def best_shares(row: int, replicas: Sequence[int], seconds: Sequence[float]) -> tuple[int, ...]:
    """Micro-batches of a replica of each mesh, in lowest terms, with which a step is shortest.

    Args:
        row: micro-batches of all replicas together; a multiple of the number of replicas.
        replicas: how many each mesh has.
        seconds: what a micro-batch costs a replica of each mesh.
    """

    def step(shares: Sequence[int]) -> float:
        return max(share * cost for share, cost in zip(shares, seconds, strict=True))

    equal = (row // sum(replicas),) * len(replicas)
    best = min(_splits(row, replicas), key=step)
    taken = best if step(best) < (1 - _TOLERANCE) * step(equal) else equal
    lowest = math.gcd(*taken)
    return tuple(share // lowest for share in taken)


def _splits(row: int, replicas: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All ways to give a replica of each mesh one micro-batch or more, and `row` in all."""
    first, *others = replicas
    if not others:
        if row >= first and row % first == 0:
            yield (row // first,)
        return
    for share in range(1, row // first + 1):
        for rest in _splits(row - first * share, others):
            yield (share, *rest)


def _seconds_per_micro_batch(job: Job, model: StageModel) -> float:
    """The median over a few steps of this rank's replica, alone."""
    args = job.args
    count = min(_MOST_MICRO_BATCHES, micro_batches_of_a_row(args) // job.plan.row(0))
    batches = chunk_iterators(
        args,
        job.datasets.train,
        coordinate=job.coordinate,
        plan=job.plan,
        consumed=0,
        device=job.device,
    )
    # The same batch every time: what reading data costs is no property of a vendor.
    repeated: list[Iterator[Any]] = [itertools.repeat(next(one)) for one in batches]
    schedule = Schedule(job, model, Timers(level=0, clock=clock_of(job.device)))
    measured = []
    with _nothing_changes(job, model):
        for _ in range(_WARM_UP + _STEPS):
            _settle(job.device)
            began = time.perf_counter()
            schedule.run(
                repeated,
                batch_size=args.micro_batch_size * job.plan.row(0) * count,
                micro_batch_size=args.micro_batch_size,
            )
            _settle(job.device)
            measured.append((time.perf_counter() - began) / count)
    return statistics.median(measured[_WARM_UP:])


@contextmanager
def _nothing_changes(job: Job, model: StageModel) -> Iterator[None]:
    """Gradients are reduced over no replicas, and they and the random states are as before."""
    config: Any = model.config
    synchronises = {
        "finalize_model_grads_func": None,
        "grad_sync_func": None,
        "no_sync_func": nullcontext,
    }
    before = {name: getattr(config, name) for name in synchronises}
    prefix = random_prefix(job.coordinate)
    random = {p.name.removeprefix(prefix): p.source() for p in random_pieces(job.coordinate)}
    with ExitStack() as stack:
        for chunk in model.chunks:
            stack.enter_context(chunk.no_sync())
            stack.callback(chunk.zero_grad_buffer)
        for name, function in synchronises.items():
            setattr(config, name, function)
        try:
            yield
        finally:
            for name, function in before.items():
                setattr(config, name, function)
            restore_random(random)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
