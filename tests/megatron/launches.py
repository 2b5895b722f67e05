"""A launch that is accepted as it is, to which every test adds the flags that it is about."""

from __future__ import annotations

import shlex
from argparse import Namespace

from megatron.hetero.arguments import Configuration, read_command_line

SMALLEST = {
    "--num-layers": "8",
    "--hidden-size": "64",
    "--num-attention-heads": "4",
    "--seq-length": "32",
    "--max-position-embeddings": "32",
    "--micro-batch-size": "2",
    "--train-iters": "10",
    "--lr": "1e-3",
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": "100",
    "--mock-data": "",
}


def command_line(flags: str = "", *, without: str = "") -> list[str]:
    dropped = without.split()
    kept = [f"{flag} {value}" for flag, value in SMALLEST.items() if flag not in dropped]
    return shlex.split(" ".join([*kept, flags]))


def configured(flags: str = "", *, without: str = "", world_size: int | None = 1) -> Configuration:
    """The smallest launch, `without` some of its flags, plus `flags`."""
    return read_command_line(command_line(flags, without=without), world_size=world_size)


def parsed(flags: str = "", *, without: str = "", world_size: int | None = 1) -> Namespace:
    """The arguments of such a launch."""
    return configured(flags, without=without, world_size=world_size).args
