"""Parses and checks a command line, plan file included, without importing torch."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from megatron.hetero.arguments.parser import collect_args
from megatron.hetero.arguments.problems import Problems
from megatron.hetero.layout import apply_plan_file, check_stages, plan_from_args


def read_command_line(
    argv: Sequence[str] | None, *, world_size: int | None = None
) -> argparse.Namespace:
    """Parse and check the command line; the result includes the derived parallel sizes.

    `world_size` are the ranks that it is for; left out: those of this process' job.

    Raises UserError listing every problem. Never import torch here: errors must appear at once.
    """
    problems = Problems()
    args = collect_args(argv, problems, world_size=world_size)
    problems.run(_check_plan(args, has_problems=bool(problems.sentences)))
    problems.refuse()
    return args


def _check_plan(args: argparse.Namespace, *, has_problems: bool) -> Iterator[str]:
    """Build the plan, for its errors. Beside flags that are invalid only stages are checked."""
    if args.hetero_plan:
        apply_plan_file(args)
    elif has_problems:
        yield from check_stages(args)
        return
    # The vendor of a homogeneous run does not affect the checks.
    plan_from_args(args, vendor="cpu")
