"""The batch: its size at any point of a run (fixed, ramped up, by a schedule), and its rules."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from hetero.plan.plan import micro_batch_sizes
from hetero.text import counted
from megatron.hetero.arguments.rules import (
    Values,
    Verdict,
    absent,
    one_for_each_mesh,
    rule,
)

_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}

Schedule = tuple[tuple[int, int], ...]
"""(tokens consumed, global batch size from there on), ascending."""


def step_schedule(text: str) -> Schedule:
    """Convert a schedule such as '0:768 250B:1536 500B:3072': tokens, and the batch from there."""
    try:
        steps = sorted(
            (_count(tokens), _count(size))
            for tokens, size in (entry.split(":") for entry in text.replace(",", " ").split())
        )
    except ValueError:
        steps = []
    is_ascending = all(one[0] < other[0] for one, other in pairwise(steps))
    if not steps or steps[0][0] != 0 or not is_ascending or any(size < 1 for _, size in steps):
        raise argparse.ArgumentTypeError(
            "must be TOKENS:BATCH pairs from 0 tokens on, such as '0:768 250B:1536' (K, M, B and T "
            f"are understood), not {text!r}"
        )
    return tuple(steps)


def _count(text: str) -> int:
    factor = _SUFFIXES.get(text[-1:].upper(), 1)
    return int(float(text[:-1] if factor > 1 else text) * factor)


def batch_sizes(args: Namespace) -> list[int]:
    """All global batch sizes of the run, in order."""
    if args.step_batch_size_schedule is not None:
        return [size for _, size in args.step_batch_size_schedule]
    if args.rampup_batch_size is not None:
        start, step, _ = args.rampup_batch_size
        return list(range(start, args.global_batch_size + 1, step))
    return [args.global_batch_size]


def batch_size_at(args: Namespace, consumed: int) -> int:
    """The global batch size of the step after `consumed` samples."""
    if args.step_batch_size_schedule is not None:
        sizes = [
            size
            for tokens, size in args.step_batch_size_schedule
            if consumed >= tokens // args.seq_length
        ]
        return int(sizes[-1])
    if args.rampup_batch_size is None or consumed > args.rampup_batch_size[2]:
        return int(args.global_batch_size)
    sizes = batch_sizes(args)
    return sizes[int(consumed / (args.rampup_batch_size[2] / (len(sizes) - 1)))]


def _growth_end(args: Namespace) -> int:
    """The number of consumed samples from which on the batch size is constant."""
    if args.step_batch_size_schedule is not None:
        return int(args.step_batch_size_schedule[-1][0] // args.seq_length)
    return int(args.rampup_batch_size[2]) + 1 if args.rampup_batch_size is not None else 0


def steps_of(args: Namespace, *, consumed: int = 0) -> int:
    """The steps that --train-samples leaves after `consumed` samples.

    As in Megatron, an incomplete last batch is dropped.
    """
    steps = 0
    while consumed < min(_growth_end(args), args.train_samples + 1):
        consumed += batch_size_at(args, consumed)
        steps += 1
    return int(steps + max(args.train_samples - consumed, 0) // args.global_batch_size)


def samples_after(args: Namespace, steps: int, *, consumed: int = 0) -> int:
    """All samples consumed, `steps` steps after `consumed`; the batches of the first may grow."""
    step = 0
    while step < steps and consumed < _growth_end(args):
        consumed += batch_size_at(args, consumed)
        step += 1
    return int(consumed + (steps - step) * args.global_batch_size)


@rule("hetero_pipeline", flags="micro_batch_size hetero_micro_batch_sizes hetero_plan")
def _required_micro_batch(args: Namespace) -> Iterator[str]:
    """A plan's meshes may have sizes of their own."""
    of_meshes = args.hetero_micro_batch_sizes, args.hetero_plan
    if args.micro_batch_size is None and of_meshes == (None, None):
        yield "--micro-batch-size is required; add it"


@rule(
    "hetero_pipeline plan_file hetero_vendors",
    flags="micro_batch_size",
    sets="hetero_micro_batch_sizes",
)
def _micro_batches_of_meshes(args: Namespace) -> Verdict:
    name, sizes = "hetero_micro_batch_sizes", args.hetero_micro_batch_sizes
    if not args.hetero_pipeline:
        return absent({name: sizes})
    if args.plan_file is None:
        return (yield from one_for_each_mesh(args, name))
    meshes = args.plan_file.meshes
    if args.micro_batch_size is None and not any(mesh.micro_batch_size for mesh in meshes):
        yield "--micro-batch-size is required; add it, or micro_batch_size to a mesh of the plan"
        return {}
    return {name: list(micro_batch_sizes(meshes, args.micro_batch_size or 1))}


@rule("meshes hetero_micro_batch_sizes", sets="micro_batch_size")
def _micro_batch(args: Namespace) -> Values:
    """The size of the widest mesh, such that every mesh takes as many sequences a step."""
    size, sizes, meshes = args.micro_batch_size, args.hetero_micro_batch_sizes, args.meshes
    if meshes is not None:
        data = [mesh.data for mesh in meshes]
        widest = data.index(max(data))
        if sizes is not None:
            shapes = zip(meshes, sizes, strict=True)
            meshes = [replace(mesh, micro_batch_size=own) for mesh, own in shapes]
            size = sizes[widest]
        if size is not None:
            size = micro_batch_sizes(meshes, size)[widest]
    return {} if size is None else {"micro_batch_size": size}


_SCHEDULE = "step_batch_size_schedule rampup_batch_size"


@rule(
    f"{_SCHEDULE} micro_batch_size data_shares hetero_data_parallel hetero_data_shares",
    known="seq_length",
    sets="global_batch_size",
)
def _global_batch(args: Namespace) -> Verdict:
    """The global batch size at the end of any schedule."""
    size, steps = args.global_batch_size, args.step_batch_size_schedule
    problems = [] if steps is None else list(_schedule_problems(args))
    if steps is not None:
        size = steps[-1][1]
    if size is None:
        size = _least_batch(args)
    if args.rampup_batch_size is not None and not problems:
        start, step, _ = args.rampup_batch_size
        if start >= size or (size - start) % step:
            problems.append(
                f"--rampup-batch-size must reach --global-batch-size {size} from {start} in steps "
                f"of {step}"
            )
    yield from problems
    return {} if problems else {"global_batch_size": size}


def _schedule_problems(args: Namespace) -> Iterator[str]:
    if args.rampup_batch_size is not None:
        yield (
            "--step-batch-size-schedule and --rampup-batch-size exclude each other; remove one of "
            "them"
        )
    last = args.step_batch_size_schedule[-1][1]
    if args.global_batch_size not in (None, last):
        yield (
            f"--step-batch-size-schedule ends with a batch of {last}, but --global-batch-size is "
            f"{args.global_batch_size}; remove the latter"
        )
    if args.seq_length is None:
        return
    thresholds = [tokens // args.seq_length for tokens, _ in args.step_batch_size_schedule]
    if len(set(thresholds)) < len(thresholds):
        yield (
            "--step-batch-size-schedule changes the batch twice within one sequence of "
            f"{args.seq_length} tokens; its thresholds are tokens"
        )


def _least_batch(args: Namespace) -> int:
    """The default of the global batch: one micro batch a replica, or each replica's share."""
    counts = args.data_shares
    if args.hetero_data_shares:
        pairs = zip(args.hetero_data_parallel, args.hetero_data_shares, strict=True)
        counts = [count * share for (_, count), share in pairs]
    return int(args.micro_batch_size * sum(counts))


_UNIT = "data_shares data_parallel_size hetero_data_sizes"
_GROUPS = (
    "virtual_pipeline_model_parallel_size pipeline_model_parallel_size "
    "microbatch_group_size_per_vp_stage"
)


@rule(f"global_batch_size micro_batch_size {_SCHEDULE} {_UNIT}", known=_GROUPS)
def _training_batch(args: Namespace) -> Iterator[str]:
    unit = args.micro_batch_size * sum(args.data_shares)
    for size in batch_sizes(args):
        if size % unit:
            yield (
                f"a global batch of {size} must be a multiple of "
                f"{_unit_text(args, '--micro-batch-size', args.micro_batch_size)}; "
                f"change {_flag_of_batch(args)}"
            )
            return
        for share in sorted(set(args.data_shares)):
            yield from _interleaved_microbatches(args, size // unit * share)


def _unit_text(args: Namespace, name: str, micro_batch_size: int) -> str:
    """In words, the number of which a global batch must be a multiple."""
    if len(set(args.hetero_data_sizes or [1])) > 1:
        unit = micro_batch_size * args.data_parallel_size
        return f"the {counted(unit, 'sequence')} that every mesh takes in a step of the pipeline"
    if len(set(args.data_shares)) == 1:
        return f"{name} {micro_batch_size} times the data-parallel size {args.data_parallel_size}"
    return (
        f"{name} {micro_batch_size} times {sum(args.data_shares)}, the sum of the replicas' shares "
        f"({' + '.join(map(str, args.data_shares))})"
    )


def _flag_of_batch(args: Namespace) -> str:
    if args.step_batch_size_schedule is not None:
        return "--step-batch-size-schedule"
    shares = " or --hetero-data-shares" if len(set(args.data_shares)) > 1 else ""
    rampup = " or --rampup-batch-size" if args.rampup_batch_size else ""
    return "--global-batch-size" + rampup + shares


def _interleaved_microbatches(args: Namespace, microbatches: int) -> Iterator[str]:
    """megatron-core's interleaved schedule needs whole groups of micro batches."""
    if args.virtual_pipeline_model_parallel_size is None:
        return
    stages = args.pipeline_model_parallel_size
    group = args.microbatch_group_size_per_vp_stage or stages
    if microbatches < stages:
        yield (
            f"with interleaving, the {counted(microbatches, 'micro batch', 'micro batches')} of a "
            f"global batch must be at least as many as the {counted(stages, 'pipeline stage')}; "
            "raise --global-batch-size"
        )
    elif not stages <= group <= microbatches:
        yield (
            f"--microbatch-group-size-per-virtual-pipeline-stage {group} must be between the "
            f"{stages} pipeline stages and the {microbatches} micro batches of a global batch"
        )
    elif 0 < microbatches % group < stages:
        yield (
            f"with interleaving, the {microbatches} micro batches of a global batch must be a "
            f"multiple of {group}, or leave at least {stages} over; change --global-batch-size"
        )


@rule(f"global_batch_size train_samples {_SCHEDULE}", known="seq_length", sets="train_iters")
def _iterations(args: Namespace) -> Verdict:
    """The steps of --train-samples."""
    steps = args.train_iters
    if args.seq_length is None and args.step_batch_size_schedule is not None:
        return {}
    if args.train_samples is not None and steps is None:
        steps = steps_of(args)
        if steps == 0:
            yield (
                f"--train-samples {args.train_samples} is less than one global batch of "
                f"{args.global_batch_size}"
            )
    return {"train_iters": steps}


@rule(sets="eval_iters")
def _eval_iters(args: Namespace) -> Values:
    """Megatron's scripts write -1 for no evaluation."""
    return {"eval_iters": max(args.eval_iters, 0)}


@rule(
    "micro_batch_size global_batch_size",
    sets="eval_micro_batch_size eval_global_batch_size",
)
def _eval_sizes(args: Namespace) -> Values:
    return {
        "eval_micro_batch_size": args.eval_micro_batch_size or args.micro_batch_size,
        "eval_global_batch_size": args.eval_global_batch_size or args.global_batch_size,
    }


@rule(
    "eval_iters eval_micro_batch_size eval_global_batch_size micro_batch_size global_batch_size "
    f"{_UNIT}",
    known=_GROUPS,
)
def _evaluation_batch(args: Namespace) -> Iterator[str]:
    if not args.eval_iters:
        return
    step = args.eval_micro_batch_size * args.data_parallel_size
    if any(step % data for data in args.hetero_data_sizes or ()):
        yield (
            f"--eval-micro-batch-size {args.eval_micro_batch_size} makes {step} sequences a step "
            f"of the {args.data_parallel_size} data-parallel ranks of the widest mesh, which the "
            f"data-parallel sizes {' '.join(map(str, args.hetero_data_sizes))} do not all divide; "
            "give a multiple of --micro-batch-size"
        )
        return
    unit = args.eval_micro_batch_size * sum(args.data_shares)
    size = args.eval_global_batch_size
    differs = (size, args.eval_micro_batch_size) != (args.global_batch_size, args.micro_batch_size)
    if differs and size % unit:
        yield (
            f"a global batch of {size} in evaluation must be a multiple of "
            f"{_unit_text(args, 'its micro batch', args.eval_micro_batch_size)}; "
            "change --eval-global-batch-size or --eval-micro-batch-size"
        )
    elif differs:
        for share in sorted(set(args.data_shares)):
            for complaint in _interleaved_microbatches(args, size // unit * share):
                yield f"{complaint} (in evaluation: --eval-global-batch-size)"


BATCH_RULES = (
    _required_micro_batch,
    _micro_batches_of_meshes,
    _micro_batch,
    _global_batch,
    _training_batch,
    _iterations,
    _eval_iters,
    _eval_sizes,
    _evaluation_batch,
)
