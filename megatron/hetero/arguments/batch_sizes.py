"""The global batch size at any point of a run: fixed, ramped up, or set by a schedule."""

import argparse
from argparse import Namespace
from itertools import pairwise

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
