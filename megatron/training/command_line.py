"""Reading a launch's command line, plan file included, before anything slow is imported."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from megatron.training.arguments.parser import collect_args
from megatron.training.arguments.problems import Problems
from megatron.training.layout import adopt_plan_file, plan_from_args


def read_command_line(argv: Sequence[str] | None) -> argparse.Namespace:
    """The checked arguments of a launch, its parallel sizes among them.

    Raises UserError with all that is wrong. torch is not imported, so that this takes no second.
    """
    problems = Problems()
    args = collect_args(argv, problems)
    problems.run(_check_plan(args, so_far=bool(problems)))
    problems.raise_all()
    return args


def _check_plan(args: argparse.Namespace, *, so_far: bool) -> Iterator[str]:
    """What is wrong with the plan; the flags of one have been checked unless a file gives it."""
    if args.hetero_plan:
        adopt_plan_file(args)
    elif so_far:
        return
    # What a homogeneous run calls its vendor makes no difference here.
    plan_from_args(args, vendor="cpu")
    yield from ()
