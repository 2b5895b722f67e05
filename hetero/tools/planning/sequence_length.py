"""The flag --seq-length of the tools that read a model's file for its shape."""

from __future__ import annotations

import argparse

from hetero.text import integer


def add_seq_length(parser: argparse.ArgumentParser, *, default: str) -> None:
    """`default` says what counts where it is left out."""
    parser.add_argument(
        "--seq-length", type=integer(1), help=f"tokens of a sample; default: {default}"
    )


def seq_length_given(options: argparse.Namespace) -> dict[str, int]:
    """What takes the place of the model file's own, by Megatron's flag; empty if left out."""
    return {} if options.seq_length is None else {"seq-length": options.seq_length}
